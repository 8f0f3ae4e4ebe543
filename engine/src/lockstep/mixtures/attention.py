"""Attention within documents: plain products and fused kernels on a CPU, FlexAttention on a GPU."""

import functools
import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.functional import SHORT, causal_attention

# Of a CPU: short documents that follow one another share a product of at most this many tokens,
SPAN = 192
# and up to this length, plain products of one document's heads beat the fused kernel.
PLAIN = 512
BLOCK = 128  # tokens of a block of FlexAttention, its default


@dataclass
class DocumentBounds:
    """Where the documents of a batch begin, and what attention needs of it in every layer.

    Compiled models and GPUs get `blocks` or `mask` before the first layer: a layer that runs again
    in the backward pass may not change what is outside of it. Other CPU models fill the cache.
    """

    begins: Tensor  # (B, T): the first token of a document, except the first of a row
    starts: Tensor  # (B, T): the place in its row where a token's document begins
    blocks: Any = None  # the `BlockMask` of FlexAttention
    mask: Tensor | None = None  # whether a query sees a key, (B, 1, T, T)
    cache: dict[Any, Any] = field(default_factory=dict)  # of the CPU

    def added(self, heads: int, dtype: torch.dtype) -> Tensor:
        """Return what to add to the scores of `heads`, (B heads, T, T): 0, or -inf if unseen."""
        if (heads, dtype) not in self.cache:
            unseen = _unseen(token_mask(self.starts), dtype).expand(-1, heads, -1, -1)
            self.cache[heads, dtype] = unseen.flatten(0, 1)
        return cast(Tensor, self.cache[heads, dtype])

    def spans(self, dtype: torch.dtype) -> tuple[list[int], list[Tensor | None]]:
        """Return the lengths of spans, which together are all rows, and what to add to each.

        A span is one document, or several short neighbors. None: the fused kernel is faster.
        """
        if dtype not in self.cache:
            T = self.starts.shape[1]
            firsts = self.begins.clone()
            firsts[:, 0] = True
            places = firsts.flatten().nonzero()[:, 0].tolist()
            sizes = joined([*places, firsts.numel()], T)
            ends = torch.tensor(sizes).cumsum(0).tolist()
            starts = self.starts.flatten()
            later = torch.full((PLAIN, PLAIN), -math.inf, dtype=dtype).triu(1)
            added: list[Tensor | None] = []
            for size, end in zip(sizes, ends, strict=True):
                # Where each token's document begins in the span; <= 0: at its first token.
                begins = starts[end - size : end] - (end - size) % T
                if size > PLAIN:
                    added.append(None)
                elif int(begins[-1]) <= 0:
                    added.append(later[:size, :size])
                else:
                    before = torch.arange(size) < begins[:, None]
                    added.append(later[:size, :size].masked_fill(before, -math.inf))
            self.cache[dtype] = sizes, added
        return cast(tuple[list[int], list[Tensor | None]], self.cache[dtype])


def joined(edges: list[int], row: int) -> list[int]:
    """Return the lengths of spans between `edges` of documents; no span crosses a row of tokens."""
    sizes: list[int] = []
    start = edges[0]
    for edge, after in zip(edges[1:], [*edges[2:], math.inf], strict=True):
        if edge % row == 0 or after - start > SPAN:
            sizes.append(edge - start)
            start = edge
    return sizes


def uses_blocks(is_cuda: bool, dropout: float, tokens: int) -> bool:
    """Return whether FlexAttention runs: on GPUs, without dropout, for whole blocks of tokens."""
    return is_cuda and not dropout and tokens % BLOCK == 0


def token_mask(starts: Tensor) -> Tensor:
    """Return whether a query sees a key, (B, 1, T, T), for documents at `starts`, (B, T)."""
    places = torch.arange(starts.shape[1], device=starts.device)
    later = places > places[:, None]  # (queries, keys)
    return ((places >= starts[:, :, None]) & ~later)[:, None]


def block_mask(starts: Tensor) -> Any:
    """Return the `BlockMask` for documents at `starts`, (B, T), without comparing all tokens.

    T must be a multiple of `BLOCK`. A query block sees the blocks from its first token's document
    on. Those that begin at or after its last token's document, and before itself, it sees whole.
    """
    from torch.nn.attention.flex_attention import BlockMask

    count = starts.shape[1] // BLOCK
    place = torch.arange(count, device=starts.device)
    earliest = starts[:, ::BLOCK, None]  # (B, query blocks, 1)
    latest = starts[:, BLOCK - 1 :: BLOCK, None]
    earlier = place < place[:, None]
    fully_visible = earlier & (place * BLOCK >= latest)
    part = (place <= place[:, None]) & ((place + 1) * BLOCK > earliest) & ~fully_visible

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return (key <= query) & (key >= starts[b, query])

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of blocks per query block, and their numbers first."""
        order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
        return blocks.sum(dim=-1, dtype=torch.int32)[:, None], order[:, None]

    lists = *listed(part), *listed(fully_visible)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=visible)


def attention_within(
    bounds: DocumentBounds | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Attend to earlier tokens of the same document; shapes as in `functional.causal_attention`."""
    copies = q.shape[1] // k.shape[1]
    if copies > 1:  # no kernel with a mask is known to share heads fast
        k, v = (heads.repeat_interleave(copies, dim=1) for heads in (k, v))
    if bounds is None or (bounds.blocks is None and bounds.mask is None):
        return cast(Tensor, _on_cpu(bounds, q, k, v, dropout, scale))
    if bounds.blocks is not None and not dropout:
        return flexible(bounds.blocks, q, k, v, scale)
    mask = bounds.mask
    if mask is None:  # this layer has dropout, which FlexAttention has not
        mask = token_mask(bounds.starts)
    settings: Any = {"attn_mask": mask, "dropout_p": dropout, "scale": scale}
    return F.scaled_dot_product_attention(q, k, v, **settings)


def flexible(blocks: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Attend with FlexAttention, which skips blocks of tokens that don't see each other."""
    return cast(Tensor, _flex(q.is_cuda)(q, k, v, block_mask=blocks, scale=scale))


def _flex(compiled: bool) -> Any:
    """Return FlexAttention; outside of compiled models, it must be compiled to be fast."""
    from torch.nn.attention.flex_attention import flex_attention

    if compiled and not torch.compiler.is_compiling():
        return _compiled_flex()
    return flex_attention


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _on_cpu(
    bounds: DocumentBounds | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Multiply only what sees each other: one document, or a few short ones, at a time."""
    if bounds is None:
        return causal_attention(q, k, v, dropout, scale)
    B, H, T, D = q.shape
    if scale is None:
        scale = D**-0.5
    if T <= SHORT:
        queries, keys, values = (x.reshape(-1, T, D) for x in (q, k, v))
        y = _plain(bounds.added(H, q.dtype), queries, keys, values, dropout, scale)
        return y.view(q.shape)
    sizes, added = bounds.spans(q.dtype)
    # Splitting once: the gradient of each slice by itself would be as large as the whole.
    split = (torch.split(x.transpose(1, 2).flatten(0, 1), sizes) for x in (q, k, v))
    settings: Any = {"dropout_p": dropout, "is_causal": True, "scale": scale}
    results = []
    for mask, *parts in zip(added, *split, strict=True):
        q, k, v = (part.transpose(0, 1) for part in parts)  # (H, tokens of the span, D)
        if mask is None:
            y = F.scaled_dot_product_attention(q[None], k[None], v[None], **settings)[0]
        else:
            y = _plain(mask, q, k, v, dropout, scale)
        results.append(y.transpose(0, 1))
    return torch.cat(results).view(B, T, H, D).transpose(1, 2)


def _plain(added: Tensor, q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float) -> Tensor:
    """Attend with products of (N, T, D), and `added` to the scores before the softmax."""
    scores = torch.baddbmm(added, q, k.mT, alpha=scale)
    return F.dropout(scores.softmax(dim=-1), dropout) @ v


def _unseen(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -math.inf)
