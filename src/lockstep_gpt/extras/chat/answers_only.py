"""Which targets of a conversation count: the assistant's texts and the ends of its messages.

This depends only on the tokens of a window. In a mixture, texts count in full, so a batch also says
which of its windows are conversations: the middle of a long message has no marker either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import tee
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lockstep_gpt.config import DataConfig, UserError, counted
from lockstep_gpt.data.datamodule import Feed, Rows, TokenDataModule
from lockstep_gpt.data.order import Positions
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
    """Batches in which only the assistant's tokens are targets."""

    template: Template

    def on_after_batch_transfer(self, batch: Any, *arguments: Any) -> Batch:
        """Return `(tokens, targets)`, with `IGNORE` for targets that don't count."""
        tokens, targets = super().on_after_batch_transfer(batch, *arguments)
        counts = answers(tokens, targets, self.template)
        return tokens, targets.masked_fill(~counts, IGNORE)


class AnswersAndTexts(TokenDataModule):
    """Batches of a mixture, in which only the assistant's tokens and those of texts are targets."""

    template: Template
    chats: frozenset[str]  # names of the sources with conversations

    def feed(self, split: str, rows: Rows) -> Feed:
        """Return a `Feed` whose batches say which of their windows are conversations."""
        feed = super().feed(split, rows)
        feed.batches = Told(feed.batches, partial(self._are_chats, split))
        return feed

    def _are_chats(self, split: str, windows: Positions) -> Tensor:
        """Return which `windows` of a split are conversations, (B,)."""
        mixture: Any = self
        sources = mixture.sources_of(split, windows)
        return torch.tensor([each in self.chats for each in sources])

    def transfer_batch_to_device(self, batch: Any, device: torch.device, *arguments: Any) -> Any:
        """Move all of a batch."""
        stored, chats = batch
        moved = super().transfer_batch_to_device(stored, device, *arguments)
        return moved, chats.to(device, non_blocking=device.type == "cuda")

    def on_after_batch_transfer(self, batch: Any, *arguments: Any) -> Batch:
        """Return `(tokens, targets)`, with `IGNORE` for targets that don't count."""
        stored, chats = batch
        tokens, targets = super().on_after_batch_transfer(stored, *arguments)
        counts = answers(tokens, targets, self.template) | ~chats[:, None]
        return tokens, targets.masked_fill(~counts, IGNORE)


class Told(Iterable[Any]):
    """Batches, each with what `of` says of its windows' numbers, (B,)."""

    def __init__(self, stream: Any, of: Callable[[Positions], Tensor]) -> None:
        self.stream, self.of, self.rows = stream, of, stream.rows

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        read, again = tee(self.rows(*self.stream.share))
        self.stream.rows = lambda *_: read
        for batch, windows in zip(self.stream, again, strict=True):
            yield batch, self.of(windows)


def _of(
    kind: Callable[..., TokenDataModule], chats: frozenset[str], *arguments: Any, **settings: Any
) -> TokenDataModule:
    """Build a data module of this kind in whose batches only answers, and texts, are targets."""
    module: Any = kind(*arguments, **settings)
    module.template, module.chats = template_of(from_dict(module.tokenizer)), chats
    own = AnswersAndTexts if chats else AnswersOnly
    module.__class__ = type("Answers", (own, type(module)), {})
    _check_validation(module)
    return module  # type: ignore[no-any-return]


def _check_validation(module: Any) -> None:
    """Raise a `UserError` if no target of the validation counts: its loss would be 0 / 0."""
    place = SimpleNamespace(root_device=torch.device("cpu"))  # all that batches need of a Trainer
    module.trainer = SimpleNamespace(strategy=place, global_rank=0, world_size=1)
    batches = (module.on_after_batch_transfer(each) for each in module.val_dataloader())
    found = any(bool((targets != IGNORE).any()) for _, targets in batches)
    module.teardown("validate")  # ends its processes, if it has some
    module.trainer = None
    if not found:
        windows = counted(module.val_windows, "validation window")
        raise UserError(
            f"{module.folder}: the {windows} used have no token of an answer; raise "
            "data.val_tokens or data.val_fraction, or a context in which answers aren't cut off"
        )


def data_module(data: DataConfig) -> Callable[..., TokenDataModule] | None:
    """Return what makes the data module of a chat, or of a mixture with one.

    It is of the kind that another extra makes for these settings, if any.
    """
    sources = getattr(data, "sources", {})  # of a mixture
    chats = frozenset(name for name, each in sources.items() if each.get("source") == "chat")
    if data.source != "chat" and not chats:
        return None
    others = (resolved(each)(data) for each in additions("DATA_MODULE") if each != OWN)
    return partial(_of, next(filter(None, others), TokenDataModule), chats)
