"""What computed a run, from each step at which that changed."""

import pytest
import torch

from lockstep.callbacks.arithmetic import Arithmetic
from lockstep.checkpoints.reading import checkpoint_path


@pytest.fixture
def histories(new_run, tmp_path):
    """Train in parts; return the history after each."""

    def train(*parts):
        path = None
        found = []
        for threads, steps in parts:
            run = new_run(max_steps=steps)
            arithmetic = Arithmetic()
            torch.set_num_threads(threads)
            run.fit(arithmetic, run.checkpoints(tmp_path), ckpt_path=path)
            path = checkpoint_path(tmp_path, steps)
            found.append(torch.load(path, weights_only=True)["arithmetic"])
        torch.set_num_threads(1)
        return found

    return train


def test_an_entry_is_added_only_when_something_changes(histories):
    before, same, other = histories((1, 2), (1, 4), (2, 6))
    assert [*before] == [0]
    assert same == before
    assert [*other] == [0, 4]
    assert other[4] == {**other[0], "threads": 2}
    assert other[0]["torch"] == str(torch.__version__)
    assert other[0]["ranks"] == 1
    assert other[0]["micro_batches"] == 2
