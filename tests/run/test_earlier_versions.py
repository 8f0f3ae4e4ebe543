"""Run directories and checkpoints of earlier versions: read, or rejected with a remedy."""

import re
import shutil

import pytest
import torch
import yaml

from lockstep_gpt import extras
from lockstep_gpt.catalog import how_to_add
from lockstep_gpt.errors import UserError
from lockstep_gpt.run.checkpoint import write_checkpoint
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.migrations import migrate

# The smoke experiment as the last commit of 0.1.0 froze it, in a project with all extras.
FROZEN = """
seed: 1337
max_steps: 20
max_tokens: null
run_name: nano-stdlib-1-20261124-185605
run_dir: run
resume: none
test: false
resume_force: false
trust_run_dir: false
precision: 32-true
compile: false
peak_tflops: null
val_every: 10
log_every: 5
verbosity: normal
batch: {micro_size: null, global_size: 8, reference_size: 8, exact_micro_size: null,
    exact_threads: 1}
model: {block_size: 32, n_layer: 2, n_head: 2, n_embd: 32, dropout: 0.0, bias: true,
    architecture: gpt,
    activation_checkpointing: false, n_kv_head: null, ngram_rows: 0, longest_ngram: 2,
    size: null, size_law: null, init_from: null, mask_documents: false, lora_rank: null,
    lora_alpha: null}
data:
  _target_: lockstep_gpt.data.sources.stdlib.StandardLibrary
  root: data
  fingerprint: 40ba95eabf683adcf002568bbdf9b97435babf17b299b054bf11388349175072
  val_fraction: 0.02
  val_tokens: 1024
  test_fraction: 0.0
  shard_mb: 256
  tokenizer: bytes
  vocab_size: null
  tokenizer_mb: 32
  invalid_utf8: replace
  num_proc: 1
packing:
  _target_: lockstep_gpt.data.packing.Stream
optim: {algorithm: adamw, lr: 0.003, head_lr_fraction: 0.2, lr_scaling: linear, warmup_steps: 5,
    warmup_tokens: null, decay: cosine, decay_fraction: 0.2, final_lr_fraction: 0.1,
    beta1: 0.9, beta2: 0.95, eps: 1.0e-08, weight_decay: 0.1, clip_norm: 1.0}
checkpoint: {every: 10, keep_last: 1, keep_best: 1, background: false, copy_to: null}
guard: {max_skipped: 0, replicas_every: 500, stall_after: 1800.0}
launch: {inline: true, keep_memory: true, max_restarts: 3, grace_seconds: 60.0, node_rank: 0,
    rdzv_endpoint: null, min_nodes: null, join_seconds: 300.0, lost_seconds: 15.0, warm: null}
trainer: {_target_: lightning.pytorch.Trainer, accelerator: cpu, devices: 1, num_nodes: 1,
    sync_batchnorm: false}
strategy:
  _target_: lockstep_gpt.distributed.strategies.auto
  process_group_backend: null
  timeout_seconds: 1800
  find_unused_parameters: false
  gradient_as_bucket_view: true
  bucket_cap_mb: 25
  static_graph: false
  comm_hook: none
callbacks:
  progress:
    _target_: lockstep_gpt.run.callbacks.progress.Progress
  sample:
    _target_: lockstep_gpt.run.callbacks.progress.Sample
    prompt: 'def '
    length: 300
    temperature: 0.8
    at_validation: false
  report:
    _target_: lockstep_gpt.extras.seeing.at_end.ReportAtEnd
logger: {}
"""
# What its first commits froze instead.
FIRST_TARGETS = {
    "strategy": "lockstep_gpt.training.strategies.auto",
    "progress": "lockstep_gpt.runtime.callbacks.progress.Progress",
    "sample": "lockstep_gpt.runtime.callbacks.progress.Sample",
}
LATER_KEYS = ("arithmetic", "step_losses")  # of a checkpoint
READERS = [("generate", "run", "--length", "3"), ("evaluate", "run")]  # of a model
RESUME = ("train", "run_dir=run", "resume=auto", "max_steps=22")


def unchanged(values):
    return values


@pytest.fixture
def earlier(finished, command):
    """Create a run directory as 0.1.0 left it, with its values changed by `change`."""

    def make(change=unchanged):
        source, run = finished[0].folder / "runs/first", command.folder / "run"
        values = change(yaml.safe_load(FROZEN))
        values["data"]["root"] = str(command.data_root)
        (run / "checkpoints").mkdir(parents=True)
        for name in ("metrics.csv", "summary.json"):
            shutil.copy(source / name, run)
        (run / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        content = torch.load(source / "checkpoints/step=000020.ckpt")
        for key in LATER_KEYS:
            del content[key]
        write_checkpoint({**content, "config": values}, run / "checkpoints/step=000020.ckpt")

    return make


def as_first_frozen(values):
    """Change what the last commit of 0.1.0 froze to what the first ones did."""
    values["strategy"]["_target_"] = FIRST_TARGETS["strategy"]
    for name in ("progress", "sample"):
        values["callbacks"][name]["_target_"] = FIRST_TARGETS[name]
    del values["packing"], values["test"]
    data = values["data"]
    del data["_target_"], data["test_fraction"]
    data.update(source="stdlib", num_workers=0, packing="stream")
    return values


@pytest.mark.slow
@pytest.mark.parametrize("change", [unchanged, as_first_frozen])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_of_an_earlier_version_can_be_resumed_and_its_model_read(
    change, devices, earlier, command
):
    earlier(change)
    assert '"loss": 4.' in command("evaluate", "run", "--json").stdout
    assert command("generate", "run", "--length", "3").stdout
    ranks = (f"trainer.devices={devices}", f"launch.inline={devices == 1}")
    assert "max_steps: 20 -> 22" in command(*RESUME, *ranks).stdout
    assert command.summary("run")["step"] == 22


def test_a_run_is_readable_without_extras_whose_settings_have_their_defaults(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "__path__", [str(tmp_path)])
    run = RunDirectory(tmp_path)
    run.config.write_text(FROZEN)
    config = run.load()
    assert config.model.n_embd == 32
    assert config.of_extras == {}
    assert set(config.callbacks) == {"progress", "sample"}


@pytest.mark.parametrize(
    ("group", "name", "value", "line"),
    [
        ("model", "mask_documents", True, f"documents.mask=true needs {how_to_add('datasets')}"),
        ("launch", "warm", True, f"warm.enabled=true needs {how_to_add('warm')}"),
    ],
)
def test_a_setting_of_a_missing_extra_is_refused_with_the_command_that_adds_it(
    group, name, value, line, monkeypatch, tmp_path
):
    monkeypatch.setattr(extras, "__path__", [str(tmp_path)])
    run, values = RunDirectory(tmp_path), yaml.safe_load(FROZEN)
    values[group][name] = value
    run.config.write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=f"{re.escape(line)}$"):
        run.load()


def with_gone(group):
    def change(values):
        (values[group] if group else values)["gone"] = 3
        return values

    return change


@pytest.mark.parametrize("group", ["model", "launch", ""])
def test_a_removed_setting_fails_in_one_line_with_the_file(earlier, command, group):
    earlier(with_gone(group))
    name = f"{group}.gone".lstrip(".")
    frozen = (command.folder / "run/config.yaml").read_bytes()
    smoke = command.smoke("launch.inline=true", *RESUME[1:])
    for words in (RESUME, (*RESUME, "trainer.devices=2"), smoke):
        errors = command(*words, status=2).stderr
        assert errors.count("\n") == 1
        assert f"run/config.yaml cannot be read ({name}: Key 'gone' not in" in errors
        assert "delete that setting, or use the version of" in errors
    assert (command.folder / "run/config.yaml").read_bytes() == frozen


@pytest.mark.parametrize("group", ["model", "data", "launch", ""])
def test_a_model_is_readable_without_settings_that_do_not_affect_it(earlier, command, group):
    earlier(with_gone(group))
    needed = group in ("model", "data")
    for words in READERS:
        errors = command(*words, status=2 if needed else 0).stderr
        assert errors.count("\n") == needed
        assert (
            f"step=000020.ckpt cannot be read ({group}.gone: Key 'gone' not" in errors
        ) == needed


def test_a_removed_class_fails_in_one_line_on_every_rank(earlier, command):
    def change(values):
        values["callbacks"]["report"] = {"_target_": "lockstep_gpt.gone.Report"}
        return values

    earlier(change)
    ranks = ("trainer.devices=2", "launch.inline=false", "trust_run_dir=true")
    errors = command(*RESUME, *ranks, status=2).stderr
    assert "Traceback" not in errors
    assert errors.count("\n") == 1
    assert errors.count("lockstep_gpt.gone.Report") == 1


def test_weights_of_other_code_fail_in_one_line_and_leave_the_run_unchanged(earlier, command):
    earlier()
    path = command.folder / "run/checkpoints/step=000020.ckpt"
    content = torch.load(path)
    name = next(iter(content["state_dict"]))
    content["state_dict"]["model.before"] = content["state_dict"].pop(name)
    write_checkpoint(content, path)
    frozen = yaml.safe_load((command.folder / "run/config.yaml").read_text())
    errors = command(*RESUME, "launch.inline=true", status=2).stderr
    assert errors.count("\n") == 1
    assert "only 27 of its 28 weights fit this model's 28; use the" in errors
    assert yaml.safe_load((command.folder / "run/config.yaml").read_text()) == migrate(frozen)
    for words in READERS:
        errors = command(*words, status=2).stderr
        assert (errors.count("\n"), "use the code that wrote it" in errors) == (1, True)
    command(*RESUME, "launch.inline=true", "resume_force=true", "max_steps=6")
