"""`callbacks=[default,trace]`: each step's bits, equal on any devices and after a resume."""

import pytest
import torch

from lockstep.callbacks.trace import one_of_ranks
from lockstep.metrics.trace_file import FIXED, read_trace

EXACT = ("batch.exact_micro_size=2", "model.dropout=0.1", "log_every=3")
TRACED = ("callbacks=[default,trace]", *EXACT)
SHORT = ("max_steps=10", "val_every=10", "checkpoint.every=4")
STOPPING = """
import lightning
class Stopping(lightning.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx + 1 == 5 * trainer.accumulate_grad_batches:
            trainer.should_stop = True
"""


@pytest.fixture
def traced(command):
    command.train(*TRACED, *SHORT, "run_dir=one")
    return command


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_with_exact_sums_the_file_is_equal_on_one_rank_and_two(traced):
    traced.train(*TRACED, *SHORT, "run_dir=two", "trainer=cpu", "trainer.devices=2", "strategy=ddp")
    one = (traced.folder / "one/trace.csv").read_bytes()
    assert one == (traced.folder / "two/trace.csv").read_bytes()
    columns, rows = read_trace(traced.folder / "one/trace.csv")
    assert [row.step for row in rows] == [*range(1, 11)]
    assert len(columns) == len(FIXED) + len(rows[0].weights)
    assert {len(row.losses) for row in rows} == {4}
    assert len({tuple(row.weights) for row in rows}) == 10  # each step changes them


@pytest.mark.slow
def test_a_resumed_run_has_the_rows_of_one_that_was_never_stopped(traced):
    (traced.folder / "stopping.py").write_text(STOPPING)
    place = {"PYTHONPATH": str(traced.folder)}
    stop = "+callbacks.stop._target_=stopping.Stopping"
    traced.train(*TRACED, *SHORT, "run_dir=part", stop, **place)
    rows = read_trace(traced.folder / "part/trace.csv")[1]
    assert [row.step for row in rows] == [1, 2, 3, 4, 5]
    traced("train", "run_dir=part", "resume=auto", **place)
    one = (traced.folder / "one/trace.csv").read_bytes()
    assert one == (traced.folder / "part/trace.csv").read_bytes()


@pytest.mark.slow
def test_tracing_changes_no_bit(traced):
    traced.train(*EXACT, *SHORT, "run_dir=plain")
    assert not (traced.folder / "plain/trace.csv").exists()
    assert traced.summary("one")["weights"] == traced.summary("plain")["weights"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize("choice", ["trace", "replays"])
def test_ranks_with_parts_of_the_model_are_refused(command, choice):
    chosen = f"callbacks=[default,{choice}]"
    words = ("trainer=cpu", "trainer.devices=2", "strategy=fsdp2", chosen, "run_dir=run")
    result = command.train(*words, status=2)
    assert (
        f"the callback {choice.title()} needs the whole model on each rank; set strategy=ddp, or "
        "leave it out"
    ) in result.stderr


def test_of_ranks_with_the_tensor_one_that_differs_is_shown():
    sums = torch.tensor([[5, 0, 5, 0], [5, 7, 5, 0], [5, 7, 6, 0], [5, 0, 5, 0]])
    assert one_of_ranks(sums).tolist() == [5, 7, 6, 0]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_muons_ranks_that_share_its_momentum_write_what_one_rank_does(command):
    words = (*TRACED, "max_steps=4", "val_every=4", "optim=muon", "model=modern_nano")
    command.train(*words, "run_dir=one")
    command.train(*words, "run_dir=two", "trainer=cpu", "trainer.devices=2", "strategy=ddp")
    one = (command.folder / "one/trace.csv").read_bytes()
    assert one == (command.folder / "two/trace.csv").read_bytes()
