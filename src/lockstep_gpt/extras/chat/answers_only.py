"""Which targets of a conversation count: the assistant's texts and the ends of its messages.

This depends only on the tokens of a window, so a batch needs no additional data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep_gpt.config import DataConfig
from lockstep_gpt.data.datamodule import TokenDataModule
from lockstep_gpt.data.tokenizer import from_dict
from lockstep_gpt.data.windows import Batch
from lockstep_gpt.extras.chat.template import Template, template_of
from lockstep_gpt.model.functional import IGNORE
from lockstep_gpt.registry import additions, resolved

OWN = ".extras.chat.answers_only:data_module"


def answers(tokens: Tensor, targets: Tensor, template: Template) -> Tensor:
    """Return which of `targets` belong to an answer or are its end; all are (B, T).

    Before the first opening in a row, it is unknown whose message continues: nothing counts there.
    """
    place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    end_of_text = template.tokenizer.end_of_text
    starts = {opening[0] for opening in template.openings.values()}
    begun = _last(_ends_of(tokens, template.openings["assistant"]), place)
    ended = _last(_any(tokens, {template.end, end_of_text, *starts}), place)
    inside = (begun >= ended) & (begun >= 0)
    return inside & ~_any(targets, {end_of_text, *starts})


def is_chat(tokens: Tensor, template: Template) -> Tensor:
    """Return which rows of `tokens`, (B, T), have a marker, (B, 1): text never has one."""
    starts = {opening[0] for opening in template.openings.values()}
    return _any(tokens, {template.end, *starts}).any(dim=1, keepdim=True)


def _any(ids: Tensor, wanted: set[int | None]) -> Tensor:
    found = torch.zeros_like(ids, dtype=torch.bool)
    for each in wanted:
        found |= ids == each
    return found


def _ends_of(ids: Tensor, opening: list[int]) -> Tensor:
    """Return where `opening` ends."""
    found = ids == opening[-1]
    for back, each in enumerate(reversed(opening[:-1]), 1):
        found[:, back:] &= ids[:, :-back] == each
        found[:, :back] = False
    return found


def _last(found: Tensor, place: Tensor) -> Tensor:
    """Return the last place so far at which `found` is true; -1 if there is none."""
    return place.where(found, -1).cummax(dim=1).values


class AnswersOnly(TokenDataModule):
    """Batches in which only the assistant's tokens are targets; in a mixture, texts count too."""

    template: Template
    mixed = False

    def on_after_batch_transfer(self, batch: Any, *arguments: Any) -> Batch:
        """Return `(tokens, targets)`, with `IGNORE` for targets that don't count."""
        tokens, targets = super().on_after_batch_transfer(batch, *arguments)
        counts = answers(tokens, targets, self.template)
        if self.mixed:
            counts |= ~is_chat(tokens, self.template)
        return tokens, targets.masked_fill(~counts, IGNORE)


def _of(
    kind: Callable[..., TokenDataModule], mixed: bool, *arguments: Any, **settings: Any
) -> TokenDataModule:
    """Build a data module of this kind whose batches have only answers as targets."""
    module: Any = kind(*arguments, **settings)
    module.template = template_of(from_dict(module.tokenizer))
    module.__class__ = type("Answers", (AnswersOnly, type(module)), {"mixed": mixed})
    return module  # type: ignore[no-any-return]


def data_module(data: DataConfig) -> Callable[..., TokenDataModule] | None:
    """Return what makes the data module of a chat, or of a mixture with one.

    It is of the kind that another extra makes for these settings, if any.
    """
    parts = getattr(data, "sources", {}).values()  # of a mixture
    mixed = any(each.get("source") == "chat" for each in parts)
    if data.source != "chat" and not mixed:
        return None
    others = (resolved(each)(data) for each in additions("DATA_MODULE") if each != OWN)
    return partial(_of, next(filter(None, others), TokenDataModule), mixed)
