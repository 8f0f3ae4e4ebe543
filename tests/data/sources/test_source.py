import pytest

from lockstep_gpt.data.sources.source import held_out


@pytest.mark.parametrize("form", ["{}", "line {:05}", "{:09} of many equal lines"])
def test_the_share_of_held_out_lines_is_kept(form):
    held = held_out([form.format(number).encode() for number in range(20_000)], 0.1)
    assert sum(held) == pytest.approx(2000, abs=4 * (20_000 * 0.1 * 0.9) ** 0.5)
