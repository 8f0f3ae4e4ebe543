"""The choices of configs/strategy/: what they build, and what they refuse in one line."""

import inspect
from datetime import timedelta
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import OmegaConf

from lockstep import configs
from lockstep.batch import Batch
from lockstep.errors import UserError
from lockstep.strategies import placing as strategies
from lockstep.strategies.exact_sums import SingleDeviceStrategy
from lockstep.strategies.placing import auto, ddp, fsdp2

EXACT = Batch(global_size=8, exact_micro_size=2, exact_threads=3)
ONE_MORE = {"gradient_as_bucket_view": "yes", "find_unused_parameters": 1, "static_graph": None}
CONFIGS = Path(configs.__file__).parent


@pytest.fixture
def two_ranks(monkeypatch):
    """The environment of one of two ranks."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")


def test_auto_does_not_wrap_one_rank():
    strategy = auto()
    assert type(strategy) is SingleDeviceStrategy
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", strategy=strategy, **quiet)
    assert trainer.strategy.root_device == torch.device("cpu")


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_one_rank_computes_on_the_first_device_of_the_accelerator(kind):
    class Accelerator:
        """Stands for one whose devices this machine lacks."""

        parse_devices = staticmethod(lambda count: [*range(count)])
        get_parallel_devices = staticmethod(lambda ids: [torch.device(kind, i) for i in ids])

    strategy = auto()
    assert strategy.root_device == torch.device("cpu")  # until a Trainer is known
    strategy.accelerator = Accelerator()
    assert strategy.root_device == torch.device(kind, 0)


def test_a_device_that_is_given_stays():
    assert SingleDeviceStrategy(torch.device("cuda", 1)).root_device == torch.device("cuda", 1)


@pytest.mark.usefixtures("two_ranks")
def test_auto_chooses_ddp_for_more_than_one_rank():
    strategy = auto(timeout_seconds=90)
    assert isinstance(strategy, DDPStrategy)
    assert strategy._timeout == timedelta(seconds=90)


def test_ddp_wraps_one_rank_too_and_uses_the_requested_backend():
    strategy = ddp(process_group_backend="mpi", bucket_cap_mb=7)
    assert isinstance(strategy, DDPStrategy)
    assert strategy._process_group_backend == "mpi"
    assert strategy._ddp_kwargs["bucket_cap_mb"] == 7
    assert strategy._ddp_kwargs["gradient_as_bucket_view"] is True
    assert strategy.comm_hook is None


@pytest.mark.parametrize("make", [auto, ddp])
@pytest.mark.parametrize("world_size", ["1", "2"])
def test_the_batch_decides_whether_gradients_are_added_in_one_order(monkeypatch, make, world_size):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    assert make(EXACT).exact_threads == 3
    assert make(Batch(8)).exact_threads is None
    assert make().exact_threads is None


@pytest.mark.parametrize("name", ["auto", "ddp", "fsdp2"])
def test_a_preset_has_each_setting_with_its_default(name):
    folder = CONFIGS / "strategy"
    preset = OmegaConf.load(folder / f"{name}.yaml")
    if "defaults" in preset:
        preset = OmegaConf.merge(OmegaConf.load(folder / "ddp.yaml"), preset)
    values = {key: preset[key] for key in preset if key not in ("_target_", "defaults")}
    parameters = inspect.signature(getattr(strategies, name)).parameters
    assert values == {key: each.default for key, each in parameters.items() if key != "batch"}
    assert preset["_target_"] == f"lockstep.strategies.placing.{name}"


@pytest.mark.parametrize(
    ("make", "wrong", "line"),
    [
        *((make, {"timeout_seconds": 0}, "=0 must be above 0") for make in (auto, ddp, fsdp2)),
        (ddp, {"process_group_backend": "tcp"}, "=tcp is not one of null, nccl, gloo, mpi"),
        (ddp, {"bucket_cap_mb": -1}, "=-1 must be above 0"),
        (ddp, {"split_graph": "maybe"}, "=maybe is not one of true, false, auto"),
        (auto, {"comm_hook": "fp8"}, "=fp8 is not one of none, fp16, bf16, powersgd"),
        *((ddp, {name: value}, " must be true or false") for name, value in ONE_MORE.items()),
        (fsdp2, {"param_dtype": "float16"}, "=float16 is not one of float32, bfloat16"),
        (fsdp2, {"reduce_dtype": "fp8"}, "=fp8 is not one of float32, bfloat16"),
        (fsdp2, {"reshard_after_forward": "no"}, "=no must be true or false"),
        (fsdp2, {"reduce_each": "no"}, "=no must be true or false"),
        (fsdp2, {"save_parts": "no"}, "=no must be true or false"),
        (fsdp2, {"tensor_parallel": 0}, "=0 must be at least 1"),
        (fsdp2, {"tensor_parallel": 3}, "=3 does not divide 2 ranks; use a divisor"),
        (
            fsdp2,
            {"tensor_parallel": 2, "batch": Batch(8).spread_over(2)},
            "=2 does not fit batch.spread_over(..., tensor_parallel=1)",
        ),
    ],
)
@pytest.mark.usefixtures("two_ranks")
def test_a_wrong_setting_is_one_line(make, wrong, line):
    with pytest.raises(UserError) as refusal:
        make(**wrong)
    assert str(refusal.value).startswith(next(iter(wrong)))
    assert str(refusal.value).endswith(line)


@pytest.mark.parametrize(
    ("make", "others", "line"),
    [
        (ddp, {"comm_hook": "fp16"}, "comm_hook=fp16 adds gradients in rank order; set "),
        (
            auto,
            {"find_unused_parameters": True},
            "find_unused_parameters=true adds gradients in rank order; set ",
        ),
        (fsdp2, {}, "strategy=fsdp2 adds gradients in rank order; set "),
    ],
)
def test_what_adds_in_another_order_is_refused_with_exact_sums(make, others, line):
    with pytest.raises(UserError) as refusal:
        make(EXACT, **others)
    assert str(refusal.value).startswith(f"{line}batch.exact_micro_size=null, or ")


@pytest.mark.usefixtures("two_ranks")
def test_parts_of_split_matrices_can_not_be_saved_alone():
    line = "save_parts=true does not work with tensor_parallel=2; set one of them to its default"
    with pytest.raises(UserError, match=f"^{line}$"):
        fsdp2(tensor_parallel=2, save_parts=True)
    assert fsdp2(save_parts=True).saves_parts
    assert fsdp2(tensor_parallel=2).tensor_parallel == 2


SETTINGS = {"process_group_backend": "gloo", "timeout_seconds": 60}


class Normed(lightning.LightningModule):
    """A plain module with a layer whose statistics ranks may share."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))

    def training_step(self, batch, _index):
        return self.net(batch["x"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_normed(strategy, **settings):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=2,
        enable_checkpointing=False,
        **quiet,
        **settings,
    )
    rows = [{"x": row} for row in torch.ones(40, 3)]
    trainer.fit(Normed(), torch.utils.data.DataLoader(rows, batch_size=2))


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on loaders
def test_batchnorm_is_not_synchronized_on_cpus(on_ranks):
    def fit(_rank):
        fit_normed(ddp(**SETTINGS), devices=2, sync_batchnorm=True)

    line = "trainer.sync_batchnorm=true needs GPUs, but this run uses cpu: torch synchronizes"
    assert all(line in said for said in on_ranks(2, fit))


@pytest.mark.filterwarnings("ignore")
def test_bf16_needs_nccl(on_ranks):
    def fit(_rank):
        fit_normed(ddp(**SETTINGS, comm_hook="bf16"), devices=2)

    line = "strategy.comm_hook=bf16 needs GPUs and NCCL; set strategy.comm_hook=fp16 or none"
    assert all(line in said for said in on_ranks(2, fit))


def test_small_buckets_do_not_cut_a_compiled_model(new_run, on_ranks):
    def fit(_rank):
        run = new_run(compile=True)
        run.fit(strategy=ddp(**SETTINGS, bucket_cap_mb=0.5), devices=2)

    line = "strategy.bucket_cap_mb=0.5 is too small for compile=true; set 1 or more, or compile="
    assert all(line in said for said in on_ranks(2, fit))


@pytest.mark.parametrize(
    ("strategy", "precision", "line"),
    [
        ({}, "16-mixed", "precision=16-mixed does not work with strategy=fsdp2; set 32-true or"),
        ({}, "bf16-true", "precision=bf16-true does not work with strategy=fsdp2; set 32-true or"),
        (
            {"param_dtype": "bfloat16"},
            "32-true",
            "strategy.param_dtype=bfloat16 with precision=32-true; set precision=bf16-mixed, or",
        ),
    ],
)
def test_shards_are_updated_in_some_precisions_only(new_run, on_ranks, strategy, precision, line):
    def fit(_rank):
        run = new_run(precision=precision)
        settings = {} if precision == "16-mixed" else {"precision": precision}
        run.fit(strategy=fsdp2(**SETTINGS, **strategy), devices=2, **settings)

    assert all(line in said for said in on_ranks(2, fit))
