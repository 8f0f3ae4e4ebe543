"""Layers split across two ranks train like those of one process."""

import re

import pytest

LINE = "python lab/ladder/two_stages.py --steps 3 trainer=cpu"


def test_both_ways_have_the_losses_of_one_process(shown):
    rows = re.findall(r"^ +[123] +(\S+) +(\S+) +(\S+)$", shown(LINE), flags=re.MULTILINE)
    assert len(rows) == 3
    for row in rows:
        losses = [float(cell) for cell in row]
        assert max(losses) - min(losses) <= 1e-10
    assert len({row[0] for row in rows}) == 3


@pytest.mark.usefixtures("modules")
def test_micro_batches_that_do_not_divide_are_rejected_in_one_line(words, monkeypatch, capsys):
    import two_stages

    monkeypatch.setattr("sys.argv", ["two_stages.py", "--micro-batches=3", *words])
    with pytest.raises(SystemExit, match="2"):
        two_stages.main(two_stages.two_stages)
    assert capsys.readouterr().err == (
        "two_stages.py: --micro-batches 3 must divide the batch of 8 samples, "
        "and --steps 5 must be at least 1\n"
    )
