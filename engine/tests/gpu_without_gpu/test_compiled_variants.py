"""`compile=true` under DDP for a model and a loss whose graphs end early."""

import pytest

# torch hides its own warning; only pytest's filters turn it into an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.mark.slow
def test_compiled_ranks_of_chunked_losses_and_recomputed_blocks_have_eager_losses(compare_compiled):
    compare_compiled("modern", chunked=True, recomputed=True)
