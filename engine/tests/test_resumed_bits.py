"""A resume starts with the saved bits, and ends with those of a run that never stopped."""

import lightning
import pytest
import torch

from lockstep.strategies.fsdp2 import build_fsdp2
from lockstep.strategies.placing import ddp

SHARDS = {
    "process_group_backend": "gloo",
    "timeout_seconds": 60,
    "reshard_after_forward": True,
    "param_dtype": "float32",
    "reduce_dtype": "float32",
    "reduce_each": False,
    "save_parts": False,
    "tensor_parallel": 1,
}
REPLICAS = {
    "process_group_backend": "gloo",
    "timeout_seconds": 60,
    "comm_hook": "none",
    "gradient_as_bucket_view": True,
    "bucket_cap_mb": 0.004,  # several buckets
}


class Start(lightning.Callback):
    """Keeps the weights with which training starts."""

    def on_train_start(self, _trainer, pl_module):
        weights = pl_module.model.state_dict()
        self.weights = {name: whole(weight).clone() for name, weight in weights.items()}


def whole(tensor):
    """Return a tensor, also one of which this rank has a shard."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def tensors_in(content, path=()):
    """Yield the path and the tensor of all tensors in nested containers."""
    if isinstance(content, torch.Tensor):
        yield path, content
    elif isinstance(content, dict | list):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in items:
            yield from tensors_in(value, (*path, key))


def assert_equal_bits(ours, theirs):
    ours, theirs = dict(tensors_in(ours)), dict(tensors_in(theirs))
    assert ours.keys() == theirs.keys() != set()
    different = [
        path
        for path, tensor in ours.items()
        if tensor.dtype != theirs[path].dtype or not torch.equal(tensor, theirs[path])
    ]
    assert different == []


def read(folder, step):
    return torch.load(folder / f"step={step:06d}.ckpt", weights_only=True)


def train_and_resume(new_run, folder, settings, place):
    """Train 6 steps in `folder/whole`; resume after step 3 of them in `folder/again`.

    `place` returns arguments of a Trainer. Returns the weights with which the resumed run starts.
    """
    saving = {"checkpoint": {"every": 3, "keep_last": 9}, "val_every": 100, **settings}
    run = new_run(**saving)
    run.fit(run.checkpoints(folder / "whole"), **place())
    run = new_run(**saving)
    start = Start()
    path = folder / "whole/step=000003.ckpt"
    run.fit(start, run.checkpoints(folder / "again"), ckpt_path=path, **place())
    return start.weights


def check(folder, weights):
    saved = read(folder / "whole", 3)
    assert_equal_bits(
        {f"model.{name}": each for name, each in weights.items()}, saved["state_dict"]
    )
    ours, theirs = read(folder / "again", 6), read(folder / "whole", 6)
    for part in ("state_dict", "optimizer_states"):
        assert_equal_bits(ours[part], theirs[part])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "64-true"])
def test_a_resume_has_the_saved_bits_in_any_precision(new_run, tmp_path, precision, algorithm):
    settings = {"precision": precision, "optim": {"algorithm": algorithm}}
    # Lightning gets the precision of 16-mixed from a plugin, for CPUs.
    arguments = {} if precision == "16-mixed" else {"precision": precision}
    check(tmp_path, train_and_resume(new_run, tmp_path, settings, lambda: arguments))
    dtype = torch.float64 if precision == "64-true" else torch.float32
    assert {weight.dtype for weight in read(tmp_path / "again", 6)["state_dict"].values()} == {
        dtype
    }


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_resume_of_shards_has_the_saved_bits(new_run, tmp_path, on_ranks, precision, algorithm):
    settings = {"precision": precision, "optim": {"algorithm": algorithm}}

    def place():
        return {"strategy": build_fsdp2(2, **SHARDS), "devices": 2, "precision": precision}

    def train(_rank):
        weights = train_and_resume(new_run, tmp_path, settings, place)
        return {name: weight.tolist() for name, weight in weights.items()}

    results = on_ranks(2, train)
    assert not isinstance(results[0], str), results[0]
    assert results[0] == results[1]
    check(tmp_path, {name: torch.tensor(values) for name, values in results[0].items()})


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize(("world", "is_static"), [(2, False), (3, False), (3, True)])
def test_a_resume_on_ranks_has_the_saved_bits(
    new_run, tmp_path, on_ranks, world, is_static, precision
):
    def place():
        return {"strategy": ddp(**REPLICAS, static_graph=is_static), "devices": world}

    def train(_rank):
        # With a validation at the save, before which Lightning would free the gradients.
        settings = {"precision": precision, "val_every": 3}
        weights = train_and_resume(new_run, tmp_path, settings, place)
        return {name: weight.tolist() for name, weight in weights.items()}

    results = on_ranks(world, train)
    assert not isinstance(results[0], str), results[0]
    assert all(weights == results[0] for weights in results)
    check(tmp_path, {name: torch.tensor(values) for name, values in results[0].items()})


def test_weights_that_a_forced_resume_takes_over_have_the_saved_bits(new_run, tmp_path):
    run = new_run(precision="64-true")
    run.fit(run.checkpoints(tmp_path), precision="64-true")
    saved = read(tmp_path, 6)["state_dict"]
    other = new_run(precision="64-true").module
    other.load_state_dict(saved, strict=False)  # as before the Trainer exists
    assert_equal_bits(other.state_dict(), saved)
