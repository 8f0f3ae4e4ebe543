"""A GPT of today, for the same loss in a fraction of the steps; it reads from top to bottom.

Beside GPT-2: rotary positions (Su et al. 2021), norms without weights, normalised queries and keys
(Henry et al. 2020), squared ReLU (So et al. 2021), a head of its own that begins at zero, as does
what is added to the residual stream, and the embedding of the token before, by a learned share.

Letters in shapes: B samples, T tokens, C width, H heads, D = C / H.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep_gpt.config import ModelConfig, UserError
from lockstep_gpt.model import gpt
from lockstep_gpt.model.functional import causal_attention

ROTARY_BASE = 10_000.0
ATTENTION_SCALE = 0.25  # of products of queries and keys that have unit variance


class GPT(gpt.GPT):
    """A decoder-only transformer without weights in norms and without biases.

    `n_kv_head` heads of keys and values serve `n_head` of queries. A `UserError` says if the shape
    does not suit this model.
    """

    cos: Tensor
    sin: Tensor

    def build(self) -> None:
        """Make the layers."""
        config = self.config
        width = config.n_embd // config.n_head
        if config.bias:
            raise UserError(
                "model.bias=true: model.architecture=modern has no biases; set it to false"
            )
        if width % 2:
            raise UserError(
                f"model.n_embd={config.n_embd} gives heads of {width}, and rotary positions turn "
                "pairs; set model.n_embd or model.n_head so that it is even"
            )
        self.token_embedding = nn.Embedding(self.padded_vocab_size, config.n_embd)
        self.previous = nn.Parameter(torch.empty(config.n_embd))  # share of the token before
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.output = nn.Linear(config.n_embd, self.padded_vocab_size, bias=False)
        cos, sin = rotations(config.block_size, width)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw the matrices with a deviation of 0.5 / sqrt(inputs); what adds or predicts is 0."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.5 * parameter.shape[1] ** -0.5)
            if name.endswith("projection.weight") or name in ("previous", "output.weight"):
                nn.init.zeros_(parameter)

    @property
    def head(self) -> Tensor:
        """Weights that turn features into logits, (V padded, C)."""
        return self.output.weight

    def features(self, tokens: Tensor) -> Tensor:
        """Return what the head reads, (B, T, C), for `tokens`, (B, T)."""
        T = self.checked_length(tokens)
        x = norm(self.token_embedding(tokens.long()))  # (B, T, C)
        x = self.dropout(x + self.previous * F.pad(x[:, :-1], (0, 0, 1, 0)))
        for block in self.blocks:
            x = block(x, self.cos[:T], self.sin[:T])
        return norm(x)


class Block(nn.Module):
    """Attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = CausalSelfAttention(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Refine the residual stream `x`, (B, T, C), at the positions of (T, D / 2) rotations."""
        x = x + self.dropout(self.attention(norm(x), cos, sin))
        return x + self.dropout(self.mlp(norm(x)))


class CausalSelfAttention(nn.Module):
    """The one place where a token sees the others, by what and by how far away they are."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.n_kv_head = config.n_head, config.n_kv_head or config.n_head
        self.dropout = config.dropout
        self.width = config.n_embd // config.n_head  # D
        self.query = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.key = nn.Linear(config.n_embd, self.n_kv_head * self.width, bias=False)
        self.value = nn.Linear(config.n_embd, self.n_kv_head * self.width, bias=False)
        self.projection = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix `x` of shape (B, T, C) over its tokens; the shape stays."""
        B, T, C = x.shape
        q = rotate(norm(self.query(x).view(B, T, self.n_head, self.width)), cos, sin)
        k = rotate(norm(self.key(x).view(B, T, self.n_kv_head, self.width)), cos, sin)
        v = self.value(x).view(B, T, self.n_kv_head, self.width)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # (B, heads, T, D)
        if self.n_kv_head < self.n_head:
            k, v = (each.repeat_interleave(self.n_head // self.n_kv_head, dim=1) for each in (k, v))
        q = q * (ATTENTION_SCALE * self.width**0.5)  # instead of 1 / sqrt(D)
        y = causal_attention(q, k, v, self.dropout if self.training else 0.0)
        return self.projection(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Two linear layers of width 4 C around the square of ReLU, each token for itself."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.expansion = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.projection = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, (B, T, C), to the same shape."""
        return self.projection(F.relu(self.expansion(x)).square())


def norm(x: Tensor) -> Tensor:
    """Return `x` with mean 0 and variance 1 in its last dimension (Ba et al. 2016)."""
    return F.layer_norm(x, x.shape[-1:])


def rotations(length: int, width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each (T, D / 2), of the angles of Su et al. 2021, section 3.2.2."""
    speeds = ROTARY_BASE ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(length).float(), speeds)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (d, d + D / 2) of `x`, (B, T, H, D), by their positions' angles."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)  # (T, 1, D / 2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
