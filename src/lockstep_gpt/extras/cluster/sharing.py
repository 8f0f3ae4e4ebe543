"""How `strategy=fsdp2` changes a plan: what each rank stores, and what ranks gather and scatter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lockstep_gpt.config import Config
from lockstep_gpt.launch.checks import FSDP2
from lockstep_gpt.training.optim import build_optimizer

SIZES = {"float32": 4, "bfloat16": 2}  # bytes


@dataclass(frozen=True)
class Sharing:
    """How the model is sharded: each block is gathered and scattered as a unit, then the rest."""

    blocks: int
    block: int  # elements of one
    rest: int  # elements outside of all blocks, which stay float32
    reshards: bool  # blocks are released after forward and gathered again for backward
    gathered_size: int  # bytes per element of a block, in transit and while it computes
    reduced_size: int  # bytes per element of a gradient in transit
    adds_whole: bool = True  # gradients before a step's last micro-batch are added up unsharded
    matrices: int = 0  # that Muon orthogonalizes, each whole on one rank
    matrix_elements: int = 0  # of all these

    @classmethod
    def of(cls, config: Config, model: nn.Module) -> Sharing | None:
        """Return how `config` shards `model`; None if every rank stores the whole model."""
        strategy = config.strategy
        if strategy.get("_target_") != FSDP2:
            return None
        blocks = [_elements(block) for block in getattr(model, "blocks", ())]
        optimizer = build_optimizer(model, config.optim, lr=config.optim.lr)
        groups = [group["params"] for group in optimizer.param_groups if group.get("muon")]
        matrices = [matrix for group in groups for matrix in group]
        return cls(
            blocks=len(blocks),
            block=max(blocks, default=0),
            rest=_elements(model) - sum(blocks),
            reshards=strategy["reshard_after_forward"],
            gathered_size=SIZES[strategy["param_dtype"]],
            reduced_size=SIZES[strategy["reduce_dtype"]],
            adds_whole=not strategy.get("reduce_each", False),
            matrices=len(matrices),
            matrix_elements=sum(matrix.numel() for matrix in matrices),
        )

    @property
    def gathered(self) -> int:
        """Bytes of weights that a rank has gathered at once, and of gradients that it scatters.

        torch gathers the next block while one computes, and scatters the gradients of one. The rest
        of the model, whose tied embedding is both first and last, stays gathered throughout.
        """
        gathered_blocks = min(2, self.blocks) if self.reshards else self.blocks
        blocks = gathered_blocks * self.gathered_size + min(1, self.blocks) * self.reduced_size
        return blocks * self.block + 4 * self.rest


def _elements(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
