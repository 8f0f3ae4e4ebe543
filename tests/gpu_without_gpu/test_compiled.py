"""`compile=true` under DDP: losses as in eager mode, each graph built once, Inductor replaced."""

from __future__ import annotations

import pytest

from lockstep_gpt.errors import UserError

# torch hides its own warning; only pytest's filters turn it into an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.mark.slow
def test_two_compiled_ranks_have_the_losses_of_eager_ones(compare_compiled):
    compare_compiled("gpt", chunked=False, recomputed=False)


@pytest.mark.parametrize("megabytes", [0.5, 0.99])
def test_buckets_too_small_for_a_compiled_ddp_are_rejected(composed, megabytes):
    ranks = ("trainer=cpu", "strategy=ddp", f"strategy.bucket_cap_mb={megabytes}")
    rule = f"strategy.bucket_cap_mb={megabytes} is too small for compile=true; set 1 or more"
    with pytest.raises(UserError, match=rule):
        composed(*ranks, "compile=true")
    composed(*ranks)
    composed(*ranks[:2], "strategy.bucket_cap_mb=1", "compile=true")
