"""The hour with a GPU, as a dry run: each measurement for real, with tiny shapes, on a CPU."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from packaging.requirements import Requirement

import lockstep
from lockstep import commands as cli

FOLDER = Path(__file__).parents[3] / "lab/first_hour"
LIST = """
import json, run
print(json.dumps({letter: [each.name for each in stage.measurements]
                  for letter, stage in run.STAGES.items()}))
"""
# What a CPU cannot do, or this project lacks; all else must be measured.
MISSING = {
    "loops": "nanoGPT: needs --nanogpt FOLDER|needs lab/benchmark.py",
    "doctor": "needs the extra cluster",
    "documents apart": "needs the extra datasets",
    "memory of 1.3 billion parameters": "needs the extra cluster",
    "SyncBatchNorm": "needs GPUs",
}
OF_EXTRAS = re.compile("needs the extra")
# What a run would have left, for measurements that go on with its figures.
SUMMARY = {
    "status": "done",
    "step": 1,
    "peak_memory_gb": 1.0,
    "first_step_seconds": 1.0,
    "train_loss": 1.0,
    "val_loss": 1.0,
    "wall_seconds": 1.0,
    "weights": {"20": "a hash"},
}
METRICS = "train/loss,throughput/tokens_per_second\n1,1\n1,1\n"
# Rows with a compilation, of the median, and of a slow end, whose MFU belongs to its own speed.
UNEVEN = """\
train/loss,throughput/tokens_per_second,throughput/mfu
3,10,0.004
2,500,0.2
2,490,0.196
2,400,0.16
"""
# Looks into the programs; says what it finds as one line of JSON.
INSIDE = """
import json
from parts import attention, gradients, recipe
from parts.micro_batch import step_of
from lockstep.functional import causal_attention
from lockstep_gpt.gpt import CausalSelfAttention

model = recipe.new_model()
seen = []

def attend(*given):
    seen.append([x.stride() for x in given[:3]])
    return causal_attention(*given)

CausalSelfAttention.attend = staticmethod(attend)
step_of(model.forward)()
gradients.show_errors("right", model)
model.blocks[1].mlp_norm.bias.grad.zero_()
gradients.show_errors("lost", model)
ours = attention.slices(recipe.C // recipe.HEADS)
print(json.dumps([seen[0], [x.stride() for x in ours], len({id(x._base) for x in ours})]))
"""
PRINTED = """\
rank 1 was killed by SIGKILL; restarting all ranks
{"rows": [{"memory": {"weights": 1}}]}
"""
# Measurements that end in each way, on a stage of a few seconds.
LIMITS = """
import sys
from pathlib import Path
from measuring import Hour, Measurement, Stage
from report import Report

def program(text, status=0):
    return lambda job: job.run([sys.executable, "-uc", f"{text}; raise SystemExit({status})"])

def divide(job):
    1 / 0

SLOW = "import time; print('row | early | 1 | 2'); print('row | un', end=''); time.sleep(60)"
out = Path(sys.argv[1])
stage = Stage("A", "Ends", 60, [
    Measurement("good", 50, program("print('row | one | 5 ms')")),
    Measurement("slow", 18, program(SLOW)),
    Measurement("broken", 50, divide),
    Measurement("wrong", 50, program("print('the cause'); print('row FAILED | two | 3 ms')")),
    Measurement("ended", 50, program("print('before'); print('the cause')", 3)),
    Measurement("unsupported", 50, program("print('x=1 does not work with y')", 2)),
    Measurement("of an extra", 50, program("print('needs the extra some (what)')", 2)),
])
report = Report(out, {"A": "Ends"}, {"devices": "a test"}, dry=False)
hour = Hour(out, report, dry=False, devices=2, seconds=float(sys.argv[2]))
stage.run(hour, *sys.argv[3:])
"""


def measured(folder: Path, stage: str = "A") -> list[dict[str, object]]:
    return list(json.loads((folder / "results.json").read_text())["rows"][stage])


def clean(environment: dict[str, str]) -> dict[str, str]:
    names = ("PYTEST_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    return {**kept, **environment}


@pytest.mark.slow
@pytest.mark.parametrize("stage", "ABCDEFGHI")
def test_a_stage_measures_everything(stage, tmp_path, python_of_forks):
    listing = [sys.executable, "-c", LIST]
    names = json.loads(subprocess.check_output(listing, cwd=FOLDER, text=True))[stage]
    words = [python_of_forks, FOLDER / "run.py", stage, "--dry", "--out", tmp_path]
    # Without limits: on a busy machine, all takes longer.
    words += ["--seconds", "3000"]
    done = subprocess.run(
        words, env=clean({"OMP_NUM_THREADS": "1"}), capture_output=True, text=True, check=False
    )
    report = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{report}"
    rows = measured(tmp_path, stage)
    assert list(dict.fromkeys(row["measurement"] for row in rows)) == names
    for row in rows:
        if row["status"] != "ok":
            assert re.search(MISSING[row["measurement"]], row["result"]), row
        assert f"| {row['name']} | " in report
    assert "| fact | |" in report
    assert f"torch {torch.__version__.partition('+')[0]}" in report
    assert f"\n## {stage}. " in report
    assert not [*tmp_path.glob("runs/D-*/checkpoints")]  # many GB on a GPU


def end_in_each_way(folder: Path, *words: str) -> str:
    words = ("-c", LIMITS, str(folder), *words)
    done = subprocess.run(
        [sys.executable, *words],
        env=clean({"PYTHONPATH": str(FOLDER)}),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
def test_no_measurement_ends_or_outlasts_its_stage(tmp_path):
    end_in_each_way(tmp_path, "60")
    rows = {row["name"]: (row["status"], row["result"]) for row in measured(tmp_path)}
    assert re.fullmatch(r"after 1[89] s|after 2\d s", rows.pop("slow")[1])
    assert rows == {
        "good: one": ("ok", "5 ms"),
        "slow: early": ("ok", "1 | 2"),  # what was printed before the end stays
        "broken": ("FAILED", "ZeroDivisionError: division by zero"),
        "wrong: two": ("FAILED", "3 ms"),  # a program says itself that a result is wrong
        "ended": ("FAILED", "exit status 3: the cause"),
        "unsupported": ("refused", "x=1 does not work with y"),
        "of an extra": ("skipped", "needs the extra some (what)"),
    }
    report = (tmp_path / "report.md").read_text()
    assert (
        "FAILED: broken, wrong: two, ended; cut off: slow; refused: unsupported; skipped: of an"
        in report
    )
    assert r"| slow: early | 1 \| 2 |" in report
    folded = re.search("<details><summary>ended</summary>(.*?)</details>", report, re.DOTALL)
    assert "before\nthe cause" in folded[1]


def test_a_stage_ends_in_time_and_a_row_can_be_measured_again(tmp_path):
    end_in_each_way(tmp_path, "1")
    assert {row["status"] for row in measured(tmp_path)} == {"cut off"}
    end_in_each_way(tmp_path, "60", "good")
    statuses = {row["name"]: row["status"] for row in measured(tmp_path)}
    assert len(statuses) == 7
    assert statuses.pop("good: one") == "ok"
    assert {*statuses.values()} == {"cut off"}


@pytest.fixture
def importable(monkeypatch):
    """Let a test import the modules of the hour; another test may have others of these names."""
    monkeypatch.syspath_prepend(FOLDER / "programs")
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def recorded(importable, monkeypatch, tmp_path):  # noqa: ARG001
    """Return the words of all processes that the hour starts on eight GPUs; none is started."""
    import measuring
    import report
    import run

    words = []

    class Done:
        returncode = 0

        def poll(self):
            return 0

        def terminate(self):
            pass

    @contextlib.contextmanager
    def record(_job, command, **_environment):
        words.append([str(word) for word in command])
        for word in words[-1]:
            if word.startswith("run_dir="):
                folder = Path(word.partition("=")[2])
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "summary.json").write_text(json.dumps(SUMMARY))
                (folder / "metrics.csv").write_text(METRICS)
        yield Done()

    monkeypatch.setattr(measuring.Job, "started", record)
    monkeypatch.setattr(measuring.Job, "output", lambda _: PRINTED)
    pages = report.Report(tmp_path, dict.fromkeys(run.STAGES, ""), {"devices": "8"}, False)
    hour = measuring.Hour(tmp_path, pages, dry=False, devices=8)
    for stage in run.STAGES.values():
        stage.run(hour)
    return words


@pytest.mark.slow
def test_the_commands_for_gpus_compose_and_their_batches_divide(recorded, capsys):
    """Dry runs replace the shapes; so this checks the real ones."""
    trains = 0
    for words in recorded:
        if "lockstep_gpt" not in words or "resume=auto" in words:
            continue
        launched = [word for word in words if word.startswith("--nproc_per_node=")]
        arguments = words[words.index("lockstep_gpt") + 1 :]
        assert "data=synthetic" not in words  # its tokens are not those of text
        settings = [word for word in arguments[1:] if re.match(r"\+?[a-z]\S*=", word)]
        if cli.main(["train", *settings, "--cfg", "job"]) != 0:
            assert OF_EXTRAS.search(capsys.readouterr().err), words
            continue
        values = yaml.safe_load(capsys.readouterr().out)
        if arguments[0] != "train":
            continue
        devices = values["trainer"]["devices"]
        if launched:
            devices = int(launched[0].partition("=")[2])
        elif devices == "auto":
            devices = 8
        lockstep.build(values["batch"]).spread_over(devices)
        schedule = lockstep.build(values["schedule"], steps=values["max_steps"], peak=1.0)
        assert schedule.steps == values["max_steps"]
        trains += 1
    assert trains == 23


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_refused_in_one_line(tmp_path):
    words = [sys.executable, FOLDER / "run.py", "--out", tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    line = "run.py: torch finds no GPU; --dry tests the measurements on a CPU\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


@pytest.mark.slow
def test_parts_share_a_process_in_which_none_outlasts_its_limit_or_ends_another(tmp_path):
    names = ["loss=0.2", "facts=100", "base=100", "optimizers=100"]
    environment = {"FIRST_HOUR_DRY": "1", "FIRST_HOUR_OUT": str(tmp_path / "absent")}
    done = in_programs("-m", "parts", "--seconds", "300", *names, **environment)
    rows = re.findall(r"^row ?(.*?) \| (\S+?)(?:: .*?)? \| (.*)$", done, re.MULTILINE)
    assert [(status, part) for status, part, _ in rows] == [
        ("cut off", "loss"),
        *[("", "facts")] * 3,
        ("FAILED", "base"),  # it cannot write its files
        *[("", "optimizers")] * 2,
    ]
    assert rows[0][2] == "after 0 s"
    assert rows[4][2].startswith("FileNotFoundError: ")


@pytest.mark.slow
def test_parts_find_a_lost_gradient_and_time_attention_as_the_model_calls_it(tmp_path):
    environment = {"FIRST_HOUR_DRY": "1", "FIRST_HOUR_OUT": str(tmp_path)}
    lines = in_programs("-c", INSIDE, **environment).splitlines()
    assert lines[0].startswith("row | right: gradients | relative errors: median ")
    assert lines[1].startswith("row FAILED | lost: gradients | ")
    assert "the largest: blocks.1.mlp_norm.bias 1.0e+00" in lines[1]
    assert len((tmp_path / "gradients-right.txt").read_text().splitlines()) == 28
    of_model, ours, tensors = json.loads(lines[2])
    assert ours == of_model
    assert tensors == 1


def in_programs(*words: str, **environment: str) -> str:
    paths = os.pathsep.join(map(str, (FOLDER / "programs", FOLDER.parents[1] / "src")))
    return subprocess.run(
        [sys.executable, *words],
        env=clean({"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment}),
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_tokens_of_speed_measurements_follow_zipf_s_law(tmp_path):
    write = [sys.executable, FOLDER / "programs/write_tokens.py"]
    subprocess.run([*write, tmp_path / "tokens.bin", "200000", "50257"], check=True)
    tokens = np.fromfile(tmp_path / "tokens.bin", "<u2")
    assert tokens.max() < 50257
    counts = np.bincount(tokens, minlength=50257)
    expected = np.log1p(1 / np.arange(1, 50257)) / np.log(50257) * len(tokens)
    for rank in (0, 1, 2, 9, 99):  # frequencies 1, 1/2, 1/3, ..., up to chance
        assert counts[rank] == pytest.approx(expected[rank], rel=0.25), rank
    assert counts[0] > 0.05 * len(tokens)


@pytest.mark.usefixtures("importable")
def test_the_utilization_is_that_of_the_median_speed(tmp_path):
    from timed_runs import Run

    (tmp_path / "metrics.csv").write_text(UNEVEN)
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    run = Run(tmp_path, "")
    assert run.tokens_per_second == 490
    assert run.utilization == pytest.approx(0.196)
    assert run.speed().startswith("490 tok/s, MFU 19.6%, ")
    (tmp_path / "metrics.csv").write_text(METRICS)  # the card's peak is unknown
    assert run.utilization == 0


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass>>", "attention"),
        ("triton_tem_fused_flex_attention_1", "attention"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_view_3", "compiled elementwise"),
        ("triton_red_fused__log_softmax_7", "compiled reductions"),
        ("void at::native::vectorized_elementwise_kernel<4, AddFunctor>", "torch's elementwise"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "collectives"),
        ("something_else", "other"),
    ],
)
def test_a_kernel_is_of_the_kind_of_its_work(kernel, kind):
    from kernel_times import kind_of

    assert kind_of(kernel) == kind


@pytest.mark.slow
def test_a_machine_with_only_torch_can_import_what_was_prepared(tmp_path):
    prepare = [sys.executable, FOLDER / "run.py", "prepare", "--folder", tmp_path / "site"]
    printed = subprocess.check_output(prepare, text=True).splitlines()
    assert float(re.match(r"(\S+) MB in ", printed[0])[1]) < 12
    assert (
        printed[-1] == f"PYTHONPATH={tmp_path}/site:engine/src:src python3 lab/first_hour/run.py A"
    )
    only_torch = tmp_path / "torch"
    only_torch.mkdir()
    for path in files_with_torch():
        (only_torch / path.name).symlink_to(path)
    root = FOLDER.parents[1]
    folders = (
        only_torch,
        tmp_path / "site",
        root / "engine/src",
        root / "src",
        FOLDER / "programs",
    )
    environment = clean({"PYTHONPATH": os.pathsep.join(map(str, folders))})
    environment["FIRST_HOUR_DRY"] = "1"
    imports = "import parts.__main__"
    # Without its own site-packages, which have everything.
    python = [sys._base_executable, "-S", "-c", imports]
    subprocess.run(python, env=environment, cwd=root, check=True, timeout=100)
    train = ["train", "experiment=smoke", "trainer=cpu", "max_steps=1", "logger=none"]
    train += ["callbacks.sample=null", f"data.root={tmp_path}/data", f"run_dir={tmp_path}/run"]
    command = [sys._base_executable, "-S", "-m", "lockstep_gpt", *train]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=100)
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "done"


def files_with_torch() -> set[Path]:
    """Return the files and folders of torch, of NumPy, and of what they need."""
    found: set[Path] = set()
    names = ["torch", "numpy"]
    done = set()
    while names:
        name = names.pop()
        if name in done:
            continue
        done.add(name)
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of another system
            continue
        tops = {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}
        found.update(Path(str(package.locate_file(top))) for top in tops)
        needed = map(Requirement, package.requires or [])
        names += [
            each.name for each in needed if not each.marker or each.marker.evaluate({"extra": ""})
        ]
    return found


def test_only_what_the_machine_lacks_is_prepared(tmp_path):
    has = "lightning,lightning-utilities,torchmetrics,packaging,pyyaml,tqdm"
    words = [sys.executable, FOLDER / "run.py", "prepare", "--folder", tmp_path, "--has", has]
    subprocess.run(words, check=True, capture_output=True)
    packages = {path.name for path in tmp_path.iterdir() if "." not in path.name}
    expected = {"hydra", "omegaconf"}
    if metadata.version("hydra-core").startswith("1.3."):
        expected |= {"antlr4", "pydevd_plugins"}
    assert packages == expected
    words[-1] = "lightening"
    refused = subprocess.run(words, check=False, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "--has lightening: there are hydra-core, " in refused.stderr
