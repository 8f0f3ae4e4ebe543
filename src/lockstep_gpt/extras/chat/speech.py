"""Tokens as text while they come: whole characters, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep_gpt.data.tokenizer import GrowingText, Tokenizer


class Speech:
    """Turns tokens into text as they come: whole characters, up to the first stop sequence."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.stopped = False
        self._growing = GrowingText(tokenizer)
        self._held = ""  # may be the beginning of a stop sequence

    def add(self, token: int) -> str:
        """Return the text that is certain after one more token."""
        return self._until_stop(self._growing.add([token]), last=False)

    def end(self) -> str:
        """Return the rest, in which a character that was not completed is U+FFFD."""
        return self._until_stop(self._growing.end(), last=True)

    def _until_stop(self, new: str, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        places = [text.find(stop) for stop in self.stops if stop in text]
        if places:
            self.stopped = True
            return text[: min(places)]
        held = 0
        if not last:
            held = max((_begun(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `stop`."""
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
