"""The examples: plain Lightning, and the same with Lockstep, which devices don't change."""

import difflib
import shutil
from pathlib import Path

import pytest

from lockstep.testing import assert_lockstep

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/train.py"))
NEEDS = {"text": "transformers"}
DEVICES = "--devices={ranks}"


@pytest.fixture(params=NAMES)
def example(request, tmp_path):
    """Return a copy of an example, whose runs may leave files."""
    if request.param in NEEDS:
        pytest.importorskip(NEEDS[request.param])
    return Path(shutil.copytree(EXAMPLES / request.param, tmp_path / request.param))


def changed(example):
    """Return the lines that Lockstep's version adds or replaces."""
    texts = [(example / name).read_text().splitlines() for name in ("plain.py", "train.py")]
    return [line[2:] for line in difflib.ndiff(*texts) if line[:2] == "+ " and line[2:]]


def test_there_are_three():
    assert NAMES == ["diffusion", "images", "text"]


def test_it_takes_at_most_15_lines(example):
    lines = changed(example)
    assert len(lines) <= 15
    assert "import lockstep" in lines


@pytest.mark.slow
def test_one_two_and_four_ranks_have_the_same_bits(example):
    assert_lockstep(str(example / "train.py"), [DEVICES], steps=4)


@pytest.mark.slow
def test_the_plain_one_depends_on_the_number_of_ranks_and_the_cause_is_named(example):
    with pytest.raises(AssertionError) as failure:
        assert_lockstep(str(example / "plain.py"), [DEVICES], ranks=(1, 2), steps=2)
    assert "begins at: step 1, the samples: " in str(failure.value)
    assert "remedy: load with train_loader" in str(failure.value)
