"""When ranks keep a state in memory: all after the same step, as often as it costs little."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

SHARE = 0.01  # of the training time that keeping states may take
# A rank's ballot, of which the largest decides.
NOTHING = 0
KEEP = 1  # rank 0's wish
NOT_NOW = 2  # of a rank whose last state isn't complete yet, or that has no room for more
# Steps before each of the first two states: the first step and the first state prepare much.
FIRST = 2


@dataclass
class MemoryTurns:
    """Decides on rank 0; the others agree or not with the vote to stop, one step ahead.

    Args:
        setting: auto, a number of steps, or false.
    """

    setting: int | str | bool = False
    is_on: bool = False  # on rank 0: whether it has memory for states
    decided: bool = field(default=False, init=False)  # whether all ranks keep this step's state
    # On rank 0: whether something that a state contains is not complete yet.
    is_blocked: Callable[[], bool] = field(default=lambda: False, repr=False)
    # On a rank that keeps shards: whether it can't keep those of the next state, which needs all.
    is_unable: Callable[[], bool] = field(default=lambda: False, repr=False)
    background: float = 0.0  # seconds of work next to training that the last state has taken
    _last: int = field(default=0, init=False)  # step of the last state, or where training began
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=64), init=False)
    _has_prepared: bool = field(default=False, init=False)  # the first state, whose cost is no rule
    _costs: deque[float] = field(default_factory=lambda: deque(maxlen=8), init=False)

    def begin(self, step: int) -> None:
        """Note the step from which this process trains."""
        self._last = step

    def decide(self, step: int, is_kept: bool) -> None:
        """Note whether all ranks keep the state after `step`."""
        self.decided = is_kept
        if is_kept:
            self._last = step

    def ballot(self, step: int) -> int:
        """Return this rank's ballot on keeping the state after `step`, the next one."""
        if self.is_unable():
            return NOT_NOW
        return KEEP if self.wish(step) else NOTHING

    def wish(self, step: int) -> bool:
        """Return whether rank 0 wants to keep the state after `step`."""
        if not self.is_on or self.is_blocked():
            return False
        if self.setting != "auto":
            return step % int(self.setting) == 0
        return step - self._last >= (self.interval or FIRST)

    @property
    def interval(self) -> int | None:
        """Steps between two states; None if the cost isn't known yet."""
        if self.setting != "auto":
            return int(self.setting) or None
        if not self._costs or not self._durations:
            return None
        step_seconds = statistics.median(self._durations)
        return max(1, math.ceil(self.cost / (SHARE * step_seconds)))

    @property
    def cost(self) -> float:
        """The seconds that a state takes from training."""
        return statistics.median(self._costs) + self.background

    def note_step(self, seconds: float) -> None:
        """Note how long a step took that nothing interrupted."""
        self._durations.append(seconds)

    def note_state(self, seconds: float) -> None:
        """Note how long training waited for a state."""
        if self._has_prepared:
            self._costs.append(seconds)
        self._has_prepared = True
