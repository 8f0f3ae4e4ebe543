"""A modern GPT that reaches the same loss in a fraction of the steps.

Unlike GPT-2, it has rotary positions (Su et al. 2021), norms without weights, normalized queries
and keys (Henry et al. 2020), squared ReLU (So et al. 2021), a separate head, residual additions
that start at zero, a learned share of the previous token's embedding, and hashed n-gram
embeddings (Pagnoni et al. 2024, section 3.2.1; modded-nanogpt's bigrams, 2026).

Letters in shapes: B samples, T tokens, C width, H heads, D = C / H.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from lockstep.functional import causal_attention, is_narrow
from lockstep.settings import check, check_whole
from torch import Tensor, nn

from lockstep_gpt.language_model import (
    LanguageModel,
    check_heads,
    check_switches,
    recompute_in_backward,
)

BF16 = torch.bfloat16
ROTARY_BASE = 10_000.0
BEGIN_AT_ZERO = ("previous", "output.weight", "ngram_embedding.weight")
HASH = (36_313, 27_191)  # odd: in 2**k rows, a change of one token mod 2**k changes the row
ATTENTION_SCALE = 0.25  # for products of queries and keys with unit variance
MOST_ROWS = 10**8  # of an n-gram embedding table
LONGEST = 32  # n of n-grams


class ModernGPT(LanguageModel):
    """A decoder-only transformer without biases, whose norms have no weights.

    Args:
        vocab_size: V, from the data's tokenizer.
        block_size: tokens of context, the largest T.
        n_layer: number of blocks.
        n_head: attention heads per block.
        n_embd: width of the residual stream, C.
        dropout: probability that an element is dropped.
        n_kv_head: heads of keys and values, which query heads share; None: `n_head`.
        ngram_rows: rows of each n-gram embedding table; 0: there is none.
        longest_ngram: largest n of the n-grams; the smallest is 2.
        activation_checkpointing: keep only inputs of blocks, and recompute the rest in backward.

    Raises:
        UserError: no such model exists, as with an odd width of heads.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        n_layer: int,
        n_head: int,
        n_embd: int,
        dropout: float = 0.0,
        n_kv_head: int | None = None,
        ngram_rows: int = 0,
        longest_ngram: int = 2,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__(vocab_size, block_size, n_layer, n_head, n_embd, dropout)
        check_heads(n_head, n_embd, n_kv_head)
        width = n_embd // n_head
        rule = f"gives heads of {width}; set it or model.n_head to make them even"
        check("model.n_embd", n_embd, width % 2 == 0, rule)
        check_whole("model.ngram_rows", ngram_rows, at_least=0, at_most=MOST_ROWS)
        check_whole("model.longest_ngram", longest_ngram, at_least=2, at_most=LONGEST)
        check_switches(activation_checkpointing=activation_checkpointing)
        self.n_kv_head = n_kv_head or n_head
        self.ngram_rows = ngram_rows
        self.longest_ngram = longest_ngram
        self.token_embedding = nn.Embedding(self.padded_vocab_size, n_embd)
        if ngram_rows:
            self.ngram_embedding = nn.Embedding(ngram_rows * (longest_ngram - 1), n_embd)
        self.previous = nn.Parameter(torch.empty(n_embd))  # share of the previous token
        shape = (n_head, self.n_kv_head, n_embd, dropout)
        self.blocks = nn.ModuleList(Block(*shape) for _ in range(n_layer))
        self.output = nn.Linear(n_embd, self.padded_vocab_size, bias=False)
        cos, sin = rotations(block_size, width)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.initialize()
        if activation_checkpointing:
            recompute_in_backward(self.blocks)

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw matrices with deviation 0.5 / sqrt(inputs); layers that add or predict are zero."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.5 * parameter.shape[1] ** -0.5)
            if name.endswith("projection.weight") or name in BEGIN_AT_ZERO:
                nn.init.zeros_(parameter)

    def shifted(self, x: Tensor) -> Tensor:
        """Return what each token's predecessor has in `x`, (B, T, ...); zeros for the first."""
        return F.pad(x[:, :-1], (0, 0) * (x.ndim - 2) + (1, 0))

    def tensor_plan(self, ranks: int) -> dict[str, Any]:
        """Return how ranks of `strategy.tensor_parallel` split the layers, as torch names it.

        Each rank has some of the heads.

        Raises:
            UserError: the ranks don't divide the heads, or would draw different noise for them.
        """
        from torch.distributed.tensor import Replicate  # takes a while
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
        )

        setting = f"strategy.tensor_parallel={ranks}"
        dropout = self.dropout.p
        check("model.dropout", dropout, not dropout, f"does not work with {setting}; set it to 0")
        rule = f"is not divisible by {setting}; set a multiple of it"
        for name in ("n_head", "n_kv_head"):
            heads = getattr(self, name)
            check(f"model.{name}", heads, heads % ranks == 0, rule)
        inputs = (Replicate(), None, None)  # of x; so its gradient is added up once
        return {
            "*embedding": RowwiseParallel(input_layouts=Replicate()),
            "blocks.*.attention": PrepareModuleInput(
                input_layouts=inputs, desired_input_layouts=inputs
            ),
            "blocks.*.attention.query": ColwiseParallel(),
            "blocks.*.attention.key": ColwiseParallel(),
            "blocks.*.attention.value": ColwiseParallel(),
            "blocks.*.attention.projection": RowwiseParallel(),
            "blocks.*.mlp.expansion": ColwiseParallel(),
            "blocks.*.mlp.projection": RowwiseParallel(),
        }

    @property
    def head(self) -> Tensor:
        """Weights that turn features into logits, (V padded, C)."""
        return self.output.weight

    def features(self, tokens: Tensor) -> Tensor:
        """Return the head's input, (B, T, C), for `tokens`, (B, T)."""
        positions = self.positions(tokens)
        tokens = tokens.long()
        x = self.token_embedding(tokens)  # (B, T, C)
        if self.ngram_rows:
            x = self.add_ngrams(x, tokens)
        x = norm(x)
        x = self.dropout(x + self.previous * self.shifted(x))

        # bfloat16 has float32's range, so everything in between can use it, not only products.
        device = tokens.device.type
        narrow = is_narrow(device)
        dtype = BF16 if narrow else x.dtype
        x = x.to(dtype)
        cos = self.cos[positions].to(dtype)
        sin = self.sin[positions].to(dtype)
        with torch.autocast(device, enabled=False) if narrow else nullcontext():
            for block in self.blocks:
                x = block(x, cos, sin)
            return norm(x)

    def add_ngrams(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Add the embeddings of the n-grams that end in each token, for n from 2 on, by hash."""
        rows = self.ngram_rows
        code = tokens * HASH[1]
        for table in range(self.longest_ngram - 1):
            code = self.shifted(code) * HASH[0] ^ tokens * HASH[1]
            x = x + self.ngram_embedding(code % rows + table * rows)
        return x


class Block(nn.Module):
    """Attention, then the MLP, each added to the residual stream."""

    def __init__(self, n_head: int, n_kv_head: int, n_embd: int, dropout: float) -> None:
        super().__init__()
        self.attention = CausalSelfAttention(n_head, n_kv_head, n_embd, dropout)
        self.mlp = MLP(n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Update the residual stream `x`, (B, T, C), with rotations `cos`, `sin`, (T, 1, D)."""
        x = x + self.dropout(self.attention(norm(x), cos, sin))
        return x + self.dropout(self.mlp(norm(x)))


class CausalSelfAttention(nn.Module):
    """Attention of each token to itself and earlier ones, by content and by distance."""

    attend = staticmethod(causal_attention)

    def __init__(self, n_head: int, n_kv_head: int, n_embd: int, dropout: float) -> None:
        super().__init__()
        self.n_head = n_head
        self.n_kv_head = n_kv_head
        self.dropout = dropout
        self.width = n_embd // n_head  # D
        self.query = Linear(n_embd, n_embd)
        self.key = Linear(n_embd, self.n_kv_head * self.width)
        self.value = Linear(n_embd, self.n_kv_head * self.width)
        self.projection = Linear(n_embd, n_embd)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix `x`, (B, T, C), across its tokens; the shape stays the same."""
        layers = (self.query, self.key, self.value)
        q, k, v = (layer(x).unflatten(2, (-1, self.width)) for layer in layers)
        q, k = rotate(norm(q), cos, sin), rotate(norm(k), cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T, D)
        y = self.attend(q, k, v, self.dropout if self.training else 0.0, ATTENTION_SCALE)
        return self.projection(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with squared ReLU between them, at width 4 C, for each token separately."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.expansion = Linear(n_embd, 4 * n_embd)
        self.projection = Linear(4 * n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, (B, T, C), to the same shape."""
        return self.projection(F.relu(self.expansion(x)).square())


def norm(x: Tensor) -> Tensor:
    """Return `x` with mean 0 and variance 1 in its last dimension (Ba et al. 2016)."""
    return F.layer_norm(x, x.shape[-1:])


class Linear(nn.Linear):
    """A linear layer without bias that computes in the type of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, (..., inputs), to (..., outputs)."""
        return F.linear(x, self.weight.to(x.dtype))


def rotations(length: int, width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines, each (T, 1, D), of Su et al. 2021, section 3.2.2."""
    speeds = ROTARY_BASE ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(length).float(), speeds)[:, None]
    return angles.cos().repeat(1, 1, 2), torch.cat([-angles.sin(), angles.sin()], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (d, d + D / 2) of `x`, (B, T, H, D), by their positions' angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([second, first], dim=-1) * sin
