"""Attention: the one place where a token sees the others."""

import torch.nn.functional as F
from torch import Tensor, nn

from lockstep_gpt.config import ModelConfig


class CausalSelfAttention(nn.Module):
    """Each token attends to itself and to those before it (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.projection = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Mix `x` of shape (B, T, C) over its tokens; the shape stays."""
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # each (B, n_head, T, C / n_head)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).reshape(B, T, C)  # heads side by side again: (B, T, C)
        mixed: Tensor = self.projection(y)
        return mixed
