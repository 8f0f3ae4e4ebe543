"""The promise as a test of any experiment: neither devices nor kills change its results."""

from lockstep.testing.assertion import assert_lockstep

__all__ = ["assert_lockstep"]
