"""`lockstep-gpt verify RUN`: clean runs are confirmed, and mistakes are one line."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from lockstep_gpt import PROJECT

from lockstep.checkpoints.reading import checkpoints_in, write_checkpoint
from lockstep.evidence.differences import (
    differing_numbers,
    largest_of_rows,
    largest_of_states,
    trace_text,
)
from lockstep.metrics.trace_file import TraceRow

PROGRAM = PROJECT.program

TWO = ("trainer=cpu", "trainer.devices=2", "strategy=ddp")
SHORT = ("max_steps=9", "val_every=6", "checkpoint.every=3", "log_every=2")
NAMES = ["embedding", "block", "norm"]


def rewrite(run, change):
    """Change the content of a run's newest checkpoint, whose checksum fits again."""
    path = checkpoints_in(run / "checkpoints")[-1]
    content = torch.load(path, weights_only=True)
    change(content)
    write_checkpoint(content, path)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_every_kind_of_record_of_a_clean_run_is_compared(command):
    command.train(
        *SHORT, "callbacks=[default,trace]", "optim=muon", "model=modern_nano", "run_dir=run"
    )
    result = command("verify", "run")
    assert result.stdout.splitlines() == [
        "run: steps 1 to 9, computed again on 1 CPU rank",
        "  steps of trace.csv   9 of 9 equal",
        "  saved states         1 of 1 equal",
        "  hashes of weights    3 of 3 equal",
        "  rows of metrics.csv  5 of 5 equal",
        "equal: all bits that the run has kept of steps 1 to 9",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_steps_between_two_saved_states_are_enough(command):
    command.train(*SHORT, "checkpoint.keep_last=3", "run_dir=run")
    assert "run: steps 4 to 6" in command("verify", "run", "--from", "3", "--to", "6").stdout
    result = command("verify", "run", "--from", "6", "--json")
    values = json.loads(result.stdout)
    assert values["verdict"] == "equal"
    assert values["compared"]["saved states"] == {"equal": 1, "of": 1}
    assert values["compared"]["rows of metrics.csv"]["of"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_killed_and_resumed_run_of_two_ranks_is_confirmed(command):
    words = (*TWO, "max_steps=40", "checkpoint.every=5", "model.dropout=0.1", "run_dir=run")
    process = command.start(*command.smoke(*words))
    folder = command.folder / "run/checkpoints"
    while not checkpoints_in(folder):
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    command("train", "run_dir=run", "resume=auto")
    assert "computed again on 2 CPU ranks" in (result := command("verify", "run").stdout)
    assert "equal: all bits that the run has kept of steps 1 to 40" in result


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_exact_sums_make_any_number_of_devices_comparable(command):
    exact = ("batch.exact_micro_size=2", "callbacks=[default,trace]")
    command.train(*SHORT, *TWO, *exact, "run_dir=run")
    result = command("verify", "run", "--devices", "1").stdout
    assert "steps 1 to 9, computed again on 1 CPU rank" in result
    assert "equal: all bits" in result


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_other_ranks_without_exact_sums_are_compared_up_to_rounding(command):
    command.train(*SHORT, *TWO, "batch.micro_size=2", "run_dir=run")
    line = command("verify", "run", "--devices", "1").stdout.splitlines()[-1]
    assert line.startswith("bits can't be compared (the run had ranks 2, here 1; ")
    assert "; rounding explains the differences: " in line

    def change(content):
        content["state_dict"]["model.final_norm.weight"][3] += 1e-3

    rewrite(command.folder / "run", change)
    line = command("verify", "run", "--devices", "1", status=1).stdout.splitlines()[-1]
    assert "; different: model.final_norm.weight after step 9 differs by 0.001, " in line
    assert line.endswith(" times what rounding errors in each step do here, more than 10 times")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize(
    ("facts", "reason"),
    [({"processor": "Another"}, "processor Another, here "), (None, "no record of its processor)")],
)
def test_another_processor_is_a_reason_not_to_compare_bits(command, facts, reason):
    command.train(*SHORT, "run_dir=run")

    def change(content):
        arithmetic = content.pop("arithmetic")
        if facts is not None:
            content["arithmetic"] = {0: {**arithmetic[0], **facts}}
        content["state_dict"]["model.final_norm.weight"].view(torch.int32)[3] ^= 1

    rewrite(command.folder / "run", change)
    line = command("verify", "run").stdout.splitlines()[-1]
    assert line.startswith(f"bits can't be compared (the run had {reason}")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_machine_whose_replays_differ_is_called_unstable(command):
    (command.folder / "unstable.py").write_text(
        "import lightning\n"
        "class Unstable(lightning.Callback):\n"
        "    def on_before_optimizer_step(self, trainer, pl_module, optimizer):\n"
        "        if trainer.global_step == 4:\n"
        "            with open('calls', 'a') as calls:\n"  # another place for each process
        "                calls.write('x')\n"
        "                place = calls.tell() % 32\n"
        "            pl_module.model.final_norm.weight.grad[place] += 1\n"
    )
    place = {"PYTHONPATH": str(command.folder)}
    unstable = "+callbacks.unstable._target_=unstable.Unstable"
    command.train(*SHORT, unstable, "run_dir=run", "launch.inline=false", **place)
    result = command("verify", "run", status=1, **place)
    line = result.stdout.splitlines()[-1]
    assert line.startswith("this machine is unstable: two replays differ from each other, first ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "none has no config.yaml; name the directory of a run"),
        (["run", "--from", "5"], "--from=5 isn't a saved state of run; it has 0, 3"),
        (["run", "--to", "5"], "--to=5 isn't a saved step after 0; run has 3"),
        (["run", "--from", "3"], "--to=3 isn't a saved step after 3; run has none"),
    ],
)
def test_a_mistake_is_one_line(command, words, message):
    command.train("max_steps=3", "val_every=3", "run_dir=run")
    result = command("verify", *words, status=2)
    assert result.stderr == f"lockstep-gpt verify: {message}\n"


def test_a_run_without_a_checkpoint_and_a_damaged_one_are_one_line_each(command):
    command.train("max_steps=3", "val_every=3", "run_dir=run")
    path = checkpoints_in(command.folder / "run/checkpoints")[-1]
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    result = command("verify", "run", status=2)
    assert "step=000003.ckpt does not match its SHA-256; use another one" in result.stderr
    shutil.rmtree(command.folder / "run/checkpoints")
    result = command("verify", "run", status=2)
    assert result.stderr == (
        f"{PROGRAM} verify: run has no checkpoint to compare with; train it until it saves\n"
    )


@pytest.mark.slow
def test_a_run_that_was_changed_when_resumed_needs_a_later_start(command):
    command.train(*SHORT, "checkpoint.keep_last=3", "run_dir=run")
    command("train", "run_dir=run", "resume=auto", "max_steps=12")
    result = command("verify", "run", status=2)
    assert result.stderr == (
        f"{PROGRAM} verify: run changed max_steps when it was resumed, so its settings can't "
        "compute the steps after 0; start after the change, with --from one of 6, 9\n"
    )


def test_the_page_has_each_option(command):
    page = (Path(__file__).parents[3] / "engine/docs/evidence.md").read_text("utf-8")
    usage = command("verify", "--help").stdout
    options = {*re.findall(r"^  (--[\w-]+)", usage, re.MULTILINE)}
    assert options == {"--from", "--to", "--devices", "--json"}
    assert options <= {*re.findall(r"--[\w-]+", page)}


def row(**changes):
    fixed = {"step": 3, "norm": "n", "tokens": ["t"] * 4, "losses": ["l"] * 4}
    rest = {
        "gradients": ["g"] * 4,
        "tensors": ["a", "b", "c"],
        "weights": ["x", "y", "z"],
        "states": ["s"] * 3,
    }
    return TraceRow(**{**fixed, **rest, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"norm": "?"}, "the sum of the gradients of all micro-batches"),
        ({"losses": ["l", "l", "?", "l"]}, "the loss of micro-batch 3 of 4 (rank 1)"),
        ({"tokens": ["t", "?", "t", "t"]}, "the tokens of micro-batch 2 of 4 (rank 0)"),
        ({"losses": ["?"] * 4}, "the loss of all 4 micro-batches"),
        (
            {"gradients": ["g", "g", "g", "?"], "tensors": ["a", "?", "c"]},
            "the gradients of micro-batch 4 of 4 (rank 1), first of block",
        ),
        (
            {"gradients": ["?", "g", "g", "g"], "tensors": ["?", "?", "c"]},
            "the gradients of micro-batch 1 of 4 (rank 0), first of block and of 1 other tensor",
        ),
        (
            {"weights": ["x", "y", "?"], "losses": ["?"] * 4},
            "norm, before the step: a wrong update, or memory",
        ),
        (
            {"states": ["s", "?", "s"], "losses": ["?"] * 4},
            "the optimizer's state of block, before the step",
        ),
    ],
)
def test_what_was_computed_first_is_named(changes, text):
    assert trace_text(row(**changes), row(), NAMES, 2) == text


def test_the_flipped_bits_of_a_single_number_are_named():
    ours = {"a": torch.zeros(4), "b": torch.ones(2), "n": 3, "gone": 1.0}
    theirs = {"a": torch.zeros(4), "b": torch.ones(2), "n": 4}
    ours["a"].view(torch.int32)[2] = 1 << 30 | 1
    ours["b"][:] = 2
    assert differing_numbers(ours, theirs) == {
        "a": "differs in number 2 of 4, bits 0, 30",
        "b": "differs in 2 of 2 numbers",
        "n": "is 3, not 4",
        "gone": "is 1.0, not None",
    }
    assert differing_numbers(theirs, theirs) == {}


def test_a_difference_is_measured_by_what_noise_does():
    rows = [[{"trainer/step": "5", "train/loss": loss}] for loss in ("2.0", "2.01", "2.012")]
    worst = largest_of_rows(rows, 1e-7)
    assert worst.ratio == pytest.approx(5)
    assert worst.is_explained
    rows[0][0]["train/loss"] = "1.5"
    worst = largest_of_rows(rows, 1e-7)
    assert not worst.is_explained
    assert worst.place == "train/loss of step 5"
    zeros = {"weight": torch.zeros(2)}
    same = largest_of_states([zeros, zeros, zeros], 5, 1e-7)
    assert same.ratio == 0
    other = largest_of_states([{"weight": torch.ones(2)}, zeros, zeros], 5, 1e-7)
    assert not other.is_explained
