import numpy as np
import pytest

from lockstep_gpt.config import SyntheticData
from lockstep_gpt.extras.sources.blocks import Position, RandomTokens, held_out

START = Position()


def blocks(corpus, start=START):
    return list(corpus.blocks(start))


@pytest.mark.parametrize("form", ["{}", "line {:05}", "{:09} of many equal lines"])
def test_the_share_of_held_out_lines_is_kept(form):
    held = held_out([form.format(number).encode() for number in range(20_000)], 0.1)
    assert sum(held) == pytest.approx(2000, abs=4 * (20_000 * 0.1 * 0.9) ** 0.5)


def test_random_tokens_go_on_at_any_block():
    found = RandomTokens(SyntheticData(tokens=900_001, val_fraction=0.25))
    whole = blocks(found)
    for number, block in enumerate(whole):
        rest = blocks(found, block.after)
        assert [each.after for each in rest] == [each.after for each in whole[number + 1 :]]
        for each, expected in zip(rest, whole[number + 1 :], strict=True):
            np.testing.assert_array_equal(each.ids, expected.ids)
