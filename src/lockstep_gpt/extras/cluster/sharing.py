"""What `strategy=fsdp2` does to a plan: who holds what, and what ranks gather and scatter.

The extra that trains so may be gone: all that is read here are the settings of its strategy.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lockstep_gpt.config import Config

TARGET = ".sharding.fsdp2.fsdp2"  # how its `strategy._target_` ends
SIZES = {"float32": 4, "bfloat16": 2}  # bytes


@dataclass(frozen=True)
class Sharing:
    """How the model is cut: every block is gathered and scattered as one, then what is left."""

    blocks: int
    block: int  # elements of one
    rest: int  # elements of what is in no block, which stays float32
    reshards: bool  # blocks are given up after forward and gathered again for backward
    gathered_size: int  # bytes of a block's element on its way to all, and while it computes
    reduced_size: int  # bytes of a gradient's element on its way
    adds_whole: bool = True  # gradients of micro-batches before the last of a step stay whole

    @classmethod
    def of(cls, config: Config, model: nn.Module) -> Sharing | None:
        """Return how `config` shares `model`; None if every rank holds the whole."""
        strategy = config.strategy
        if not str(strategy.get("_target_")).endswith(TARGET):
            return None
        blocks = [_elements(block) for block in getattr(model, "blocks", ())]
        return cls(
            blocks=len(blocks),
            block=max(blocks, default=0),
            rest=_elements(model) - sum(blocks),
            reshards=strategy["reshard_after_forward"],
            gathered_size=SIZES[strategy["param_dtype"]],
            reduced_size=SIZES[strategy["reduce_dtype"]],
            adds_whole=not strategy.get("reduce_each", False),
        )

    @property
    def gathered(self) -> int:
        """Bytes of what a rank has gathered at once, and of the gradients that it hands out.

        torch gathers the next block while one computes, and scatters the gradients of one; the
        rest of the model, whose tied embedding is first and last, is there throughout.
        """
        there = min(2, self.blocks) if self.reshards else self.blocks
        blocks = there * self.gathered_size + min(1, self.blocks) * self.reduced_size
        return blocks * self.block + 4 * self.rest


def _elements(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
