"""Lets a model see one document at a time.

A document ends with the tokenizer's `end_of_text`, so the tokens alone say where documents begin.
"""

from functools import partial
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lockstep.errors import UserError
from lockstep.mixtures.attention import (
    DocumentBounds,
    attention_within,
    block_mask,
    token_mask,
    uses_blocks,
)
from lockstep.tokens.tokenizer import Tokenizer


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
        """Let each token attend to itself and earlier tokens of its document; see `attention`."""
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
