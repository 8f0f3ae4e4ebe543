import pytest
import torch

from lockstep.strategies.bit_sums import INTEGERS, bit_sum


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_any_flipped_bit_changes_the_sum(dtype):
    tensor = torch.arange(6).view(2, 3).to(dtype)
    before = bit_sum(tensor)
    integers = tensor.view(-1).view(INTEGERS[dtype.itemsize])
    last = 8 * dtype.itemsize - 1
    for mask in [*(1 << bit for bit in range(last)), -(1 << last)]:
        integers[4] ^= mask
        assert bit_sum(tensor) != before
        integers[4] ^= mask
    assert bit_sum(tensor) == before


def test_the_sum_of_parts_is_the_sum_in_any_order():
    tensor = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    assert bit_sum(tensor[:3].t()) + bit_sum(tensor[3:]) == bit_sum(tensor)
