"""What an agent does at a stop signal: torch's elastic agent ends at an exception of its own."""

import signal
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException


class FirstSignal:
    """The handler of an agent's stop signals: it raises the first; repeats change nothing."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __call__(self, signum: int, _frame: FrameType | None) -> None:
        """Handle a signal; Python calls it."""
        if self.received is None:
            self.received = signal.Signals(signum)
            self.raise_received()

    def raise_received(self) -> None:
        """Raise torch's exception for the signal, if one came."""
        if self.received is not None:
            raise SignalException(f"stopped by {self.received.name}", self.received)
