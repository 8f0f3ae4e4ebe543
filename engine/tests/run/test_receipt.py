"""What rank 0 says of any run: facts of the Trainer and of what it trains."""

import lightning
import pytest
import torch

import lockstep
from lockstep.batch import Batch
from lockstep.run.receipt import facts_of, random_lines
from lockstep.settings import counted
from lockstep.strategies import placing as strategies


class Own(lightning.LightningModule):
    """A plain module that knows nothing of this project."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 2)


def trainer_of(strategy="auto", **settings):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return lightning.Trainer(accelerator="cpu", strategy=strategy, **quiet, **settings)


def test_one_rank_has_its_device_and_the_module_s_size():
    threads = counted(torch.get_num_threads(), "thread")
    assert facts_of(trainer_of(precision="bf16-mixed"), Own()) == {
        "module": "Own, 8 parameters",
        "devices": f"1 x cpu, {threads} each",
        "strategy": "SingleDeviceStrategy",
        "precision": "bf16-mixed",
    }
    assert "module" not in facts_of(trainer_of())


@pytest.mark.parametrize(("norm", "line"), [(None, "none"), (0.5, "gradients to a norm of 0.5")])
def test_how_gradients_are_clipped_is_said(norm, line):
    trainer = trainer_of(callbacks=[lockstep.ClipAndSkip(norm)])
    assert facts_of(trainer, Own())["clipping"] == line


@pytest.mark.parametrize(
    ("changes", "accumulation", "copies"),
    [
        ({}, 2, False),
        ({"find_unused_parameters": True}, 1, False),
        ({"find_unused_parameters": True}, 2, True),
        ({"gradient_as_bucket_view": False}, 1, True),
    ],
)
def test_buckets_that_are_a_second_copy_are_counted(on_ranks, changes, accumulation, copies):
    def say(_rank):
        strategy = strategies.ddp(process_group_backend="gloo", timeout_seconds=60, **changes)
        trainer = trainer_of(strategy, devices=2, accumulate_grad_batches=accumulation)
        return facts_of(trainer)["strategy"]

    line = "DDPStrategy over gloo"
    if copies:
        line += ", plus memory for its buckets: 1 more gradient of all weights"
    assert on_ranks(2, say) == [line, line]


def test_groups_that_split_each_matrix_are_counted(on_ranks):
    def say(_rank):
        strategy = strategies.fsdp2(process_group_backend="gloo", tensor_parallel=2)
        return facts_of(trainer_of(strategy, devices=2))["strategy"]

    line = "ShardedStrategy over gloo, 1 data x 2 tensor parallel"
    assert on_ranks(2, say) == [line, line]


@pytest.mark.parametrize(
    ("layers", "line"),
    [
        (0, "trainer.sync_batchnorm=true changes nothing: the model has none"),
        (1, "1 layer synchronized over all ranks"),
        (2, "2 layers synchronized over all ranks"),
    ],
)
def test_what_sync_batchnorm_does_is_said(on_ranks, layers, line):
    def say(_rank):
        norms = [torch.nn.BatchNorm1d(3) for _ in range(layers)]
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), *norms)
        strategy = strategies.ddp(process_group_backend="gloo")
        asked = facts_of(trainer_of(strategy, devices=2, sync_batchnorm=True), model)
        strategy = strategies.ddp(process_group_backend="gloo")
        return asked["batchnorm"], "batchnorm" in facts_of(trainer_of(strategy, devices=2), model)

    assert on_ranks(2, say) == [(line, False)] * 2


DROPPING = {
    "dropout": torch.nn.Dropout(0.2),
    "channels": torch.nn.Sequential(torch.nn.Dropout2d(0.2), torch.nn.Linear(2, 2)),
    "recurrent": torch.nn.GRU(3, 3, num_layers=2, dropout=0.2),
    "attention": torch.nn.MultiheadAttention(4, 2, dropout=0.2),
}
STEADY = {
    "none": torch.nn.Linear(2, 2),
    "zero": torch.nn.Dropout(0.0),
    "frozen": torch.nn.Dropout(0.2).eval(),
    "recurrent": torch.nn.GRU(3, 3),
    "attention": torch.nn.MultiheadAttention(4, 2),
}


@pytest.mark.parametrize("module", DROPPING.values(), ids=DROPPING)
def test_layers_whose_random_numbers_depend_on_devices_are_said_with_the_remedy(module):
    """Only if the number of devices decides the size of micro-batches, which numbers belong to."""
    said = random_lines(module, Batch(8).spread_over(1))["random"]
    assert said.startswith("1 layer with dropout, whose numbers belong to a micro-batch")
    assert "set batch.micro_size=2 for" in said  # 8 samples, which 1, 2, and 4 devices can share
    assert "batch.micro_size=4 " in random_lines(module, Batch(8).spread_over(2))["random"]
    assert "batch.micro_size=1 " in random_lines(module, Batch(13).spread_over(1))["random"]
    for batch in (Batch(8, 2), Batch(8, exact_micro_size=2), Batch(micro_size=2)):
        assert random_lines(module, batch.spread_over(1)) == {}


@pytest.mark.parametrize("module", STEADY.values(), ids=STEADY)
def test_a_module_that_drops_nothing_has_no_line_of_random_numbers(module):
    assert random_lines(module, Batch(8).spread_over(1)) == {}
