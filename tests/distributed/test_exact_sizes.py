"""Which numbers of devices add in the same order, and the receipt's line on it."""

import torch

from lockstep_gpt.distributed.exact_sizes import sums_line
from lockstep_gpt.settings import counted
from lockstep_gpt.training.batch_settings import BatchConfig
from lockstep_gpt.training.schedule import plan_batch


def said(devices=2, **batch):
    batch = BatchConfig(global_size=48, **batch)
    plan = plan_batch(batch, 64, devices, 1)
    is_exact = batch.exact_micro_size is not None
    return sums_line(plan.global_size, plan.micro_size, plan.accumulation, is_exact=is_exact)


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
