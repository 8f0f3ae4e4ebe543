"""The promise as a test of any experiment: neither devices nor kills change its results.

`drill` breaks its runs on purpose.
"""

from lockstep.testing.assertion import assert_lockstep
from lockstep.testing.composition import assert_composes, choices

__all__ = ["assert_composes", "assert_lockstep", "choices"]
