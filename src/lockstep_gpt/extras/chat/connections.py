"""Connections that end if their client takes too long: uvicorn itself waits forever."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

CLIENT_SECONDS = 30  # to send the head of a request, to send its body, or to read an answer


class Connection(H11Protocol):
    """A connection with a limit on each time that the server waits for its client.

    Args:
        seconds: from the head of a request to the end of its response.
        arguments: passed on to uvicorn's class.
    """

    _limit: asyncio.TimerHandle | None = None

    def __init__(self, *, seconds: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seconds = seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._end_after(CLIENT_SECONDS)

    def handle_events(self) -> None:
        """Handle what has arrived; a request then has its own limit."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._end_after(self.seconds)

    def on_response_complete(self) -> None:
        """Wait until the client has read the response, and sent the next request."""
        self._end_after(CLIENT_SECONDS)  # first: a request that has already arrived begins now
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        if self._limit:
            self._limit.cancel()
        super().connection_lost(exc)

    def _end_after(self, seconds: float) -> None:
        if self._limit:
            self._limit.cancel()
        self._limit = self.loop.call_later(seconds, self.transport.abort)
