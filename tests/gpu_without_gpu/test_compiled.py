"""`compile=true` under DDP: losses as in eager mode, each graph built once, Inductor replaced."""

from __future__ import annotations

import pytest

from lockstep_gpt.distributed import strategies
from lockstep_gpt.errors import UserError
from lockstep_gpt.model import functional

# torch hides its own warning; only pytest's filters turn it into an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
SETTINGS = {"process_group_backend": None, "timeout_seconds": 60, "comm_hook": "none"}


@pytest.mark.parametrize(
    ("architecture", "chunked", "recomputed"),
    [("gpt", False, False), ("modern", True, True)],
    ids=["whole loss", "chunked loss and recomputed blocks"],
)
def test_two_compiled_ranks_have_the_losses_of_eager_ones(
    new_run, losses_on_two, monkeypatch, architecture, chunked, recomputed
):
    monkeypatch.setattr(functional, "MANY_LOGITS", 0 if chunked else 1 << 60)
    shape = {"architecture": architecture, "activation_checkpointing": recomputed}
    shape |= {"bias": architecture == "gpt"}

    def losses(compiled):
        return losses_on_two(
            lambda: new_run(max_steps=4, model=shape, compile=compiled),
            lambda: strategies.ddp(**SETTINGS, bucket_cap_mb=25),
        )

    (eager, _), (compiled, made) = losses(False), losses(True)
    # The loss in chunks is a separate Function, before which a graph ends; steps build no others.
    once = [("train", 0)] * (1 + chunked) + [("validate", 0)] * (1 + chunked)
    assert made == (once, once)
    for ours, theirs in zip(compiled, eager, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("megabytes", [0.5, 0.99])
def test_buckets_too_small_for_a_compiled_ddp_are_rejected(composed, megabytes):
    ranks = ("trainer=cpu", "strategy=ddp", f"strategy.bucket_cap_mb={megabytes}")
    rule = f"strategy.bucket_cap_mb={megabytes} is too small for compile=true; set 1 or more"
    with pytest.raises(UserError, match=rule):
        composed(*ranks, "compile=true")
    composed(*ranks)
    composed(*ranks[:2], "strategy.bucket_cap_mb=1", "compile=true")
