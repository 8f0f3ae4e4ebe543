"""What exit statuses mean, and what a run makes of them."""

import signal

import pytest

from lockstep.errors import RunError, UserError
from lockstep.exits import (
    Ending,
    Exit,
    after_signal,
    describe_endings,
    failed_endings,
)

CAUSES = {
    -9: "was killed by SIGKILL",
    -999: "ended with status -999",
    1: "ended with status 1",
    75: "lost its peers",
    128: "ended with status 128",
    143: "was stopped by SIGTERM",
    255: "ended with status 255",  # above 128, but not a signal
}


@pytest.mark.parametrize(("status", "cause"), CAUSES.items())
def test_every_status_of_a_rank_has_a_cause(status, cause):
    assert str(Ending(status)) == cause


def test_a_stopped_process_ends_as_shells_report_it():
    assert Ending(after_signal(signal.SIGTERM)).stopped_by == signal.SIGTERM == 15
    assert Ending(-signal.SIGKILL).killed_by == signal.SIGKILL
    assert (Ending(255).stopped_by, Ending(143).killed_by) == (0, 0)


def test_only_a_mistake_and_a_stop_are_the_choice_of_a_rank():
    chosen = [status for status in (0, 1, 2, 75, 143, 255, -9) if Ending(status).is_deliberate]
    assert chosen == [2, 143]


def test_errors_have_the_documented_statuses():
    assert (Exit.DONE, RunError.status, UserError.status) == (0, 1, 2)


def test_of_ranks_that_ended_the_culprits_are_named():
    lost, killed, other = Ending(75), Ending(-9), Ending(255)
    assert describe_endings({0: lost, 1: killed}) == "rank 1 was killed by SIGKILL"
    assert describe_endings({0: lost, 1: other}) == "rank 1 ended with status 255"
    assert describe_endings({0: lost, 1: Ending(0)}) == "rank 1 ended with status 0"
    assert describe_endings({0: lost, 1: lost}) == "rank 0 lost its peers, rank 1 lost its peers"


def test_ranks_that_left_others_alone_count_unless_one_was_killed():
    assert failed_endings({0: None, 1: 0}) == {}
    assert failed_endings({0: 75, 1: 0, 2: None}) == {0: Ending(75), 1: Ending(0)}
    assert failed_endings({0: -9, 1: 0, 2: 75}) == {0: Ending(-9), 2: Ending(75)}
