import pytest

from lockstep_gpt.launch.agent import _cause, causes

CAUSES = {
    -9: "was killed by SIGKILL",
    -999: "ended with status -999",
    1: "ended with status 1",
    75: "lost its peers",
    128: "ended with status 128",
    143: "was stopped by SIGTERM",
    255: "ended with status 255",  # above 128, and yet no signal
}


@pytest.mark.parametrize(("status", "cause"), CAUSES.items())
def test_every_status_of_a_rank_has_a_cause(status, cause):
    assert _cause(status) == cause


def test_of_ranks_that_ended_those_that_were_killed_are_named_first():
    assert causes({0: 75, 1: -9}) == "rank 1 was killed by SIGKILL"
    assert causes({0: 75, 1: 255}) == "rank 0 lost its peers, rank 1 ended with status 255"
