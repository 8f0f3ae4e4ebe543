import pytest
import torch

from lockstep.ranks.gathering import gather_stacks


def stack_of(rank, counts, dtype):
    numbers = torch.arange(sum(counts) * 6).reshape(-1, 2, 3)
    return torch.split(numbers, counts)[rank].to(dtype)


@pytest.mark.parametrize(
    "counts",
    [[2, 2, 2], [3, 2, 2], [2, 0, 1], [0, 1, 0], [0, 0, 4]],
    ids=["even", "filled up", "one without", "one rank's", "several of one rank"],
)
def test_all_ranks_get_the_stacks_of_all_in_rank_order(on_ranks, counts):
    def gather(rank):
        gathered = []
        for dtype in (torch.float32, torch.bfloat16):
            gathering = gather_stacks(stack_of(rank, counts, dtype), counts)
            # A second one is on its way at the same time.
            other = gather_stacks(stack_of(rank, counts, dtype) + 1, counts)
            gathered += [gathering.wait(), other.wait() - 1]
        return [each.dtype for each in gathered], [each.tolist() for each in gathered]

    whole = torch.arange(sum(counts) * 6.0).reshape(-1, 2, 3)
    for dtypes, gathered in on_ranks(3, gather):
        assert dtypes == [torch.float32] * 2 + [torch.bfloat16] * 2
        assert gathered == [whole.tolist()] * 4
