"""The model with its residual stream in bfloat16: less memory to move between the products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep_gpt.model.gpt import GPT
from parts.micro_batch import measure
from parts.recipe import new_model


class NarrowGPT(GPT):
    """GPT-2 whose residual stream is bfloat16."""

    def features(self, tokens: Tensor) -> Tensor:
        """Return the head's input, as `GPT` does, but narrow."""
        x = self.token_embedding(tokens.long())
        x = self.dropout(x + self.position_embedding.weight[self.positions(tokens)])
        x = x.to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x)


class NarrowNorm(nn.LayerNorm):
    """A LayerNorm whose output is as narrow as its input: autocast would make it float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`; torch computes the statistics in float32 all the same."""
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


def main() -> None:
    """Measure it; compare with the part `base`, whose stream is what the project has."""
    model: Any = new_model()
    model.__class__ = NarrowGPT
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.__class__ = NarrowNorm
    measure("residual stream", model)
