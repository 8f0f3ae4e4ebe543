"""Lets a model see one document at a time.

A document ends with the tokenizer's `end_of_text`, so the tokens alone say where documents begin.
Attention within documents is plain products and fused kernels on a CPU, FlexAttention on a GPU.
"""

import math
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lockstep.errors import UserError
from lockstep.functional import SHORT, causal_attention
from lockstep.tokens.tokenizer import Tokenizer

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


@cache
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


class Documents:
    """Replaces what a model's tokens see; `bounds` are of the forward pass that runs now."""

    def __init__(self, model: Any, end: int, one_graph: bool) -> None:
        self.model = model
        self.end = end
        self.one_graph = one_graph
        self.bounds: DocumentBounds | None = None  # None: each row is one document
        self.model_positions = model.positions
        self.model_shifted: Any = getattr(model, "shifted", None)

    def positions(self, tokens: Tensor) -> Any:
        """Return each token's position in its document, (B, T); a slice if all rows are whole.

        Called first in each forward pass of `tokens`, (B, T). Raises what the model's own raises.
        """
        positions = self.model_positions(tokens)  # raises if there are too many
        looks_first = tokens.is_cpu and not self.one_graph  # a GPU would wait; the graph would end
        if looks_first and not (tokens[:, :-1] == self.end).any():
            self.bounds = None
            return positions
        begins = torch.zeros_like(tokens, dtype=torch.bool)
        begins[:, 1:] = tokens[:, :-1] == self.end
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        starts = places.where(begins, 0).cummax(dim=1).values
        self.bounds = DocumentBounds(begins, starts)
        dropout = self.model.dropout.p if self.model.training else 0.0
        if uses_blocks(tokens.is_cuda, dropout, tokens.shape[1]):
            self.bounds.blocks = block_mask(starts)
        elif not looks_first:
            self.bounds.mask = token_mask(starts)
        return places - starts

    def shifted(self, x: Tensor) -> Tensor:
        """Return the model's own `shifted`, with zeros for the first token of each document."""
        y: Tensor = self.model_shifted(x)
        if self.bounds is None:
            return y
        return y.masked_fill(self.bounds.begins.view(*y.shape[:2], *[1] * (y.ndim - 2)), 0)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float | None = None
    ) -> Tensor:
        """Let each token attend to itself and earlier tokens of its document."""
        return attention_within(self.bounds, q, k, v, dropout, scale)

    def block_forward(self, inner: Any, *arguments: Any) -> Any:
        """Run a checkpointed block; its second forward pass sees the documents of its first."""
        if torch.compiler.is_compiling():  # the graph itself has the right tensors
            return checkpoint(*inner.args, *arguments, **inner.keywords)
        return checkpoint(self._again, *inner.args, self.bounds, *arguments, **inner.keywords)

    def _again(self, forward: Any, bounds: DocumentBounds | None, *arguments: Any) -> Any:
        self.bounds = bounds
        return forward(*arguments)


class MaskDocuments(Callback):
    """Lets attention, positions, and n-grams of a module's `model` stay within one document.

    Args:
        compiled: whether torch compiles the model.

    Raises:
        UserError: before training, if the tokenizer has no end of text, or the model lacks the
            places for this.
    """

    def __init__(self, compiled: bool = False) -> None:
        self.compiled = compiled
        self._is_done = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Change the model, before Lightning lets the module compile or shard it."""
        if self._is_done:  # by an earlier use of the same Trainer
            return
        self._is_done = True
        module: Any = pl_module
        tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        one_graph = self.compiled and any(map(_is_recomputed, module.model.blocks))
        mask_documents(module.model, tokenizer, one_graph)
        new_model = getattr(module, "new_model", None)
        if new_model is not None:  # for what samples from a copy of the weights
            module.new_model = partial(_masked, new_model, tokenizer)


def _masked(new_model: Any, tokenizer: Tokenizer) -> Any:
    model = new_model()
    mask_documents(model, tokenizer)
    return model


def mask_documents(model: Any, tokenizer: Tokenizer | None, one_graph: bool = False) -> None:
    """Change a model so that documents don't see each other.

    With `one_graph`, a CPU masks at all T x T scores without leaving the compiled graph, as a GPU
    does: torch compiles nothing of a model whose recomputed blocks leave it. Others may leave it,
    to multiply one document at a time: at 256 tokens, whole steps are 15 to 20 % faster.

    Raises a `UserError` if the tokenizer has no end of text, or the model not the places for this.
    """
    refuse_endless("callbacks=documents", tokenizer)
    attentions = [module for module in model.modules() if hasattr(module, "attend")]
    if not attentions or not hasattr(model, "positions"):
        raise UserError(
            f"callbacks=documents needs attention with `attend` and a model with `positions`;"
            f" {type(model).__name__} of {type(model).__module__} lacks them, so leave it out"
        )
    assert tokenizer is not None
    assert tokenizer.end_of_text is not None
    documents = Documents(model, tokenizer.end_of_text, one_graph)
    model.positions = documents.positions
    if documents.model_shifted is not None:
        model.shifted = documents.shifted
    for attention in attentions:
        attention.attend = documents.attend
    for block in model.blocks:
        if _is_recomputed(block):
            block.forward = partial(documents.block_forward, block.forward)


def _is_recomputed(block: Any) -> bool:
    """Return whether backward computes a block again."""
    return isinstance(block.forward, partial) and block.forward.func is checkpoint


def refuse_endless(wanted: str, tokenizer: Tokenizer | None) -> None:
    """Raise a `UserError` if no token ends a document."""
    if tokenizer is None or tokenizer.end_of_text is None:
        raise UserError(
            f"{wanted} needs documents, and this tokenizer has no end of text; leave it out"
        )
