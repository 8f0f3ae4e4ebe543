"""The page is right about each callback, logger, profiler, and argument of Lightning."""

import inspect
import re
import shutil
from pathlib import Path

import lightning
import pytest
from lightning.pytorch import callbacks, loggers, profilers
from lockstep_gpt.train import build

import lockstep
from lockstep.errors import UserError
from lockstep.launch.targets import REFUSED, refuse_mistakes

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "engine/docs/lightning.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))


def table(section):
    """Return name -> the page's statement about it."""
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", SECTIONS[section], flags=re.MULTILINE)
    return {name: said for names, said in rows for name in re.findall(r"`(\w+)`", names)}


CALLBACKS, LOGGERS = table("Callbacks"), table("Loggers and profilers")
WORKING, UNUSABLE = (
    re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.+?) \|", part, flags=re.MULTILINE)))
    for part in SECTIONS["Arguments of the Trainer"].split("| refused | instead |")
)
ARGUMENTS = [*WORKING, *UNUSABLE]


def test_the_page_names_all_that_lightning_has():
    assert {*CALLBACKS} == {*callbacks.__all__}
    named = {name for name in dir(loggers) if name.endswith("Logger")}
    assert {*LOGGERS} == named | {*profilers.__all__}
    arguments = [*inspect.signature(lightning.Trainer).parameters]
    assert sorted(ARGUMENTS) == sorted(arguments)


def test_the_page_names_exactly_the_callbacks_that_are_refused():
    assert {*REFUSED} == {name for name, said in CALLBACKS.items() if said.startswith("refused")}


@pytest.mark.parametrize(("name", "rule"), REFUSED.items())
def test_a_callback_that_cannot_work_is_rejected_with_the_page_s_remedy(name, rule):
    node = {"_target_": f"lightning.pytorch.callbacks.{name}"}
    with pytest.raises(UserError) as refusal:
        refuse_mistakes({"callbacks": {"mine": node}})
    assert str(refusal.value) == f"callbacks.mine: Lightning's {name} {rule}"


def train(cfg):
    """Train as a notebook does."""
    module, data, trainer = build(cfg, lockstep.Run.alone(config=cfg))
    trainer.fit(module, data)


@pytest.mark.parametrize("name", UNUSABLE)
def test_trainer_arguments_are_refused_exactly_as_the_page_says(name, composed, command):
    value = {"enable_checkpointing": False, "barebones": True, "default_root_dir": "x"}.get(name, 3)
    words = ("experiment=smoke", "logger=none", "trainer.devices=1", f"trainer.{name}={value}")
    cfg = composed(*words, f"data.root={command.data_root}")
    with pytest.raises(UserError) as refusal:
        train(cfg)
    assert "\n" not in str(refusal.value)
    assert name in str(refusal.value)


# Combined in one run each; the second run has what conflicts with something in the first.
TOGETHER = [
    {
        "DeviceStatsMonitor": {},
        "EMAWeightAveraging": {"decay": 0.9},
        "EarlyStopping": {"monitor": "val/loss"},
        "LambdaCallback": {},
        "LearningRateMonitor": {},
        "ModelCheckpoint": {"monitor": "train/loss", "every_n_train_steps": 5, "save_last": True},
        "ModelSummary": {"max_depth": 2},
        "OnExceptionCheckpoint": {"dirpath": "failed"},
        "SpikeDetection": {},
        "ThroughputMonitor": {
            "batch_size_fn": {"_target_": "hydra.utils.get_method", "path": "builtins.len"}
        },
        "TQDMProgressBar": {},
        "Timer": {},
    },
    {"RichModelSummary": {}, "RichProgressBar": {}, "WeightAveraging": {}},
]


def test_the_runs_below_have_every_callback_that_works():
    tried = [name for part in TOGETHER for name in part]
    assert sorted(tried) == sorted(name for name, said in CALLBACKS.items() if "works" in said)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", TOGETHER, ids=["most", "others"])
def test_callbacks_that_work_go_through_a_run(chosen, command):
    if "RichProgressBar" in chosen:
        pytest.importorskip("rich", reason="Lightning's Rich callbacks need rich, which we don't")
    words = [
        f"+callbacks.{name}={{_target_: lightning.pytorch.callbacks.{name}"
        + "".join(f", {key}: {value}" for key, value in settings.items()).replace("'", "")
        + "}"
        for name, settings in chosen.items()
    ]
    bar = "trainer.enable_progress_bar=true"
    said = command.train(*words, bar, "callbacks.progress=null", "run_dir=run").stdout
    assert "done in" in said
    assert command.summary("run")["step"] == 20
    if "ModelCheckpoint" in chosen:
        names = {path.name for path in (command.folder / "run/lightning/checkpoints").iterdir()}
        assert {"last.ckpt", "epoch=0-step=20.ckpt"} <= names
        assert "Trainable params" in said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
def test_the_notebook_s_cells_work(finished, command, monkeypatch, capsys):
    (command.folder / "data").symlink_to(command.data_root)
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "runs/first")
    monkeypatch.chdir(command.folder)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    page = (ROOT / "docs/after_the_run.md").read_text("utf-8")
    notebook = page.partition("\n## In a notebook\n")[2]
    cells = re.findall(r"```python\n(.*?)```", notebook, flags=re.DOTALL)
    assert len(cells) == 3
    names = {}
    for cell in cells:
        exec(compile(cell, "cell", "exec"), names)
    printed = capsys.readouterr().out
    (loss,) = re.findall(r"^\d\.\d+$", printed, flags=re.MULTILINE)
    assert float(loss) == pytest.approx(finished[0].summary("runs/first")["val_loss"], rel=1e-7)
    assert re.search(r"'train/loss': tensor\(\d\.\d+\)", printed)
    assert names["status"] == 0
