"""`compile=true` under DDP: losses as in eager mode, each graph built once, Inductor replaced."""

from __future__ import annotations

import pytest

from lockstep.errors import UserError
from lockstep.strategies import placing as strategies

# torch hides its own warning; only pytest's filters turn it into an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.mark.slow
def test_two_compiled_ranks_have_the_losses_of_eager_ones(compare_compiled):
    compare_compiled("gpt", chunked=False, recomputed=False)


@pytest.mark.parametrize("megabytes", [0.5, 0.99])
def test_buckets_too_small_for_a_compiled_ddp_are_rejected(new_run, on_ranks, graphs, megabytes):
    def fit(megabytes, compiled):
        run = new_run(max_steps=1, compile=compiled)
        run.fit(graphs, strategy=strategies.ddp(bucket_cap_mb=megabytes), devices=1)

    def rank(_number):
        with pytest.raises(UserError) as refused:
            fit(megabytes, compiled=True)
        fit(megabytes, compiled=False)
        made = len(graphs.made)
        fit(1, compiled=True)
        return str(refused.value), made, bool(graphs.made)

    rule = "is too small for compile=true; set 1 or more, or compile=false"
    line = f"strategy.bucket_cap_mb={megabytes} {rule}"
    assert on_ranks(1, rank) == [(line, 0, True)]
