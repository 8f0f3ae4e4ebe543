"""Orders of addition: the tree is the most exact, and the plot is drawn."""

import re

LINE = "python lab/ladder/sums.py"


def test_the_tree_s_error_is_the_smallest_and_grows_least(shown):
    rows = re.findall(r"^ *(\d+) +(\S+e-\d+) +(\S+e-\d+) +(\S+e-\d+)$", shown(LINE), re.MULTILINE)
    errors = {int(leaves): [float(each) for each in own] for leaves, *own in rows}
    assert [*errors] == [8, 64, 512]
    for alone, ring, tree in errors.values():
        assert tree < ring <= alone
    growth = [last / first for first, last in zip(errors[8], errors[512], strict=True)]
    assert growth == sorted(growth, reverse=True)


def test_the_picture_is_drawn(shown, shared):
    assert "chart: runs/sums.png" in shown(LINE)
    assert (shared / "ladder/runs/sums.png").read_bytes().startswith(b"\x89PNG")
