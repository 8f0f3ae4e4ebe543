import pytest
import torch

from lockstep_gpt.distributed.bit_sums import INTEGERS, bit_sum


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_any_flipped_bit_changes_the_sum(dtype):
    tensor = torch.arange(6).view(2, 3).to(dtype)
    before = bit_sum(tensor)
    integers = tensor.view(-1).view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    )
    for bit in range(8 * dtype.itemsize):
        mask = torch.tensor(1 << bit).to(torch.int64).view(torch.int64)
        if bit == 8 * dtype.itemsize - 1:
            mask = -mask
        integers[4] ^= mask.to(integers.dtype)
        assert bit_sum(tensor) != before
        integers[4] ^= mask.to(integers.dtype)
    assert bit_sum(tensor) == before


def test_the_sum_of_parts_is_the_sum_in_any_order():
    tensor = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    assert bit_sum(tensor[:3].t()) + bit_sum(tensor[3:]) == bit_sum(tensor)
