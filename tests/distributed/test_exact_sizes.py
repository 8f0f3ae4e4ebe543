"""Which numbers of devices add in the same order, and the receipt's line on it."""

import torch

from lockstep_gpt.batch import Batch
from lockstep_gpt.distributed.exact_sizes import sums_line
from lockstep_gpt.settings import counted


def said(devices=2, **batch):
    batch = Batch(48, **batch).spread_over(devices)
    sizes = (batch.global_size, batch.micro_size, batch.accumulation)
    return sums_line(*sizes, is_exact=batch.is_exact)


def test_the_receipt_names_devices_with_equal_bits():
    line = said(exact_micro_size=4, devices=3)
    assert line.startswith("equal bits on 1, 3, 6, or 12 devices: 12 micro-batches in one order")
    assert line.endswith("plus memory for 2 more gradients of all weights")
    assert f"torch {torch.__version__}, {counted(torch.get_num_threads(), 'thread')}" in line


def test_the_receipt_names_a_size_for_equal_bits():
    assert said(micro_size=4).endswith(
        "equal up to rounding on any number of devices; set batch.exact_micro_size=4 for equal "
        "bits on 1, 3, 6, or 12, with 12 micro-batches per step"
    )
    whole = said(micro_size=48, devices=1)
    assert "set batch.exact_micro_size=12 for equal bits on 1, 2, or 4, with" in whole
