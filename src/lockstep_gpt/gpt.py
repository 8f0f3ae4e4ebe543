"""GPT-2 (Radford et al. 2019). In shapes: B samples, T tokens, C width, V vocabulary size."""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from lockstep import functional
from lockstep.settings import check_choice
from torch import Tensor, nn

from lockstep_gpt.language_model import (
    LanguageModel,
    check_switches,
    recompute_in_backward,
)

RESIDUAL_DTYPES = ("float32", "bfloat16")


class GPT(LanguageModel):
    """A decoder-only transformer: pre-norm, learned positions, head tied to the embedding.

    Args:
        vocab_size: V, from the data's tokenizer.
        block_size: tokens of context, the largest T.
        n_layer: number of blocks.
        n_head: attention heads per block.
        n_embd: width of the residual stream, C.
        dropout: probability that an element is dropped.
        bias: whether linear layers and norms have biases, as in GPT-2.
        residual_dtype: type of the residual stream under bf16-mixed, float32 or bfloat16, which
            takes less memory and time.
        activation_checkpointing: keep only inputs of blocks, and recompute the rest in backward.

    Raises:
        UserError: no such model exists.
    """

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        n_layer: int,
        n_head: int,
        n_embd: int,
        dropout: float = 0.0,
        bias: bool = True,
        residual_dtype: str = "float32",
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(vocab_size, block_size, n_layer, n_head, n_embd, dropout)
        check_switches(bias=bias, activation_checkpointing=activation_checkpointing)
        check_choice("model.residual_dtype", residual_dtype, RESIDUAL_DTYPES)
        self.bias = bias
        self.residual_dtype = residual_dtype
        self.token_embedding = nn.Embedding(self.padded_vocab_size, n_embd)
        self.position_embedding = nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList(Block(n_head, n_embd, dropout, bias) for _ in range(n_layer))
        self.final_norm = Norm(n_embd, bias=bias)
        self.initialize()
        if activation_checkpointing:
            recompute_in_backward(self.blocks)

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw the weights as GPT-2 does (Radford et al. 2019, section 2.3, and its code).

        Weights are normal with standard deviation 0.02. In the two layers per block that add to
        the residual stream, it is divided by sqrt(2 n_layer): the variance doesn't grow with depth.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("projection.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.n_layer))
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            else:
                nn.init.ones_(parameter)  # the scale of a norm
        self.token_embedding.weight[self.vocab_size :].zero_()

    @property
    def head(self) -> Tensor:
        """Weights that turn features into logits, (V padded, C): here the token embedding's."""
        return self.token_embedding.weight

    def tensor_plan(self, _ranks: int) -> dict[str, Any]:
        """Return how ranks of `strategy.tensor_parallel` split the layers, as torch names it.

        Rows of queries, keys, and values are in one matrix, so all ranks compute all heads.
        """
        from torch.distributed.tensor import Replicate  # takes a while
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {
            "blocks.*.attention.qkv": ColwiseParallel(output_layouts=Replicate()),
            "blocks.*.attention.projection": RowwiseParallel(input_layouts=Replicate()),
            "blocks.*.mlp.expansion": ColwiseParallel(),
            "blocks.*.mlp.projection": RowwiseParallel(),
        }

    def features(self, tokens: Tensor) -> Tensor:
        """Return the head's input, (B, T, C), for `tokens`, (B, T)."""
        x = self.token_embedding(tokens.long())  # (B, T, C)
        x = self.dropout(x + self.position_embedding.weight[self.positions(tokens)])
        if self.residual_dtype == "bfloat16" and functional.is_narrow(x.device.type):
            x = x.bfloat16()
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x)


class Norm(nn.LayerNorm):
    """LayerNorm (Ba et al. 2016) whose result has the type of its input, also under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`, (..., C), in its last dimension."""
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):  # it would return float32
            weight = self.weight.to(x.dtype)
            bias = cast(Tensor | None, self.bias)
            if bias is not None:
                bias = bias.to(x.dtype)
            if x.device.type != "cpu":
                return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
            # The kernel of a CPU would add the gradients of weights over all tokens in bfloat16.
            x = F.layer_norm(x, self.normalized_shape, eps=self.eps) * weight
            return x if bias is None else x + bias


class Block(nn.Module):
    """Attention, then the MLP, each added to the residual stream."""

    def __init__(self, n_head: int, n_embd: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.attention_norm = Norm(n_embd, bias=bias)
        self.attention = CausalSelfAttention(n_head, n_embd, dropout, bias)
        self.mlp_norm = Norm(n_embd, bias=bias)
        self.mlp = MLP(n_embd, bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Update the residual stream `x`, (B, T, C)."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class CausalSelfAttention(nn.Module):
    """The only layer in which tokens see other tokens."""

    attend = staticmethod(functional.causal_attention)  # a mask of documents replaces it

    def __init__(self, n_head: int, n_embd: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.n_head = n_head
        self.dropout = dropout
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        self.projection = nn.Linear(n_embd, n_embd, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Mix `x`, (B, T, C), across its tokens; the shape stays the same."""
        B, T = x.shape[:2]
        qkv = self.qkv(x).view(B, T, 3, self.n_head, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # each (B, n_head, T, C / n_head)
        y = self.attend(q, k, v, self.dropout if self.training else 0.0)
        y = y.transpose(1, 2).flatten(2)  # concatenate the heads: (B, T, C)
        return self.projection(y)


class MLP(nn.Module):
    """Two linear layers with GELU between them, at width 4 C, for each token separately."""

    def __init__(self, n_embd: int, bias: bool) -> None:
        super().__init__()
        self.expansion = nn.Linear(n_embd, 4 * n_embd, bias=bias)
        self.projection = nn.Linear(4 * n_embd, n_embd, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, (B, T, C), to the same shape."""
        hidden = F.gelu(self.expansion(x), approximate="tanh")  # (B, T, 4 C)
        return self.projection(hidden)
