"""Print what a training step asks of a GPU, part by part, and its predicted speed; without a GPU.

usage: lockstep-gpt ledger [--hardware h100,h200,a100-80,rtx4090]
           [settings of lockstep-gpt train]

Example: lockstep-gpt ledger experiment=gpt2_124m

Bytes and operations are those of a micro-batch, of the accumulation in each but the first, and of
an update. Seconds come from the time model of `plan`; nothing is measured. Devices share a table
if they compute the loss in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep_gpt.extras.cluster import flags
from lockstep_gpt.extras.cluster.hardware import find_hardware

DEVICES = "h100,h200,a100-80,rtx4090"


def main(arguments: Sequence[str]) -> int:
    """Print the tables for each configuration in `arguments`."""
    parser = flags.Parser("ledger", str(__doc__))
    parser.add_argument("--hardware", default=DEVICES)
    options, overrides = parser.split(arguments)
    devices = [find_hardware(name) for name in options.hardware.split(",")]
    # These import torch.
    from lockstep_gpt.extras.cluster.ledger_tables import composed, report

    for config, vocab_size in flags.each_job(overrides, composed):
        print("\n".join(report(config, vocab_size, devices)))
    return 0
