"""Collectives on real ranks match their definitions."""

import re

LINE = "python lab/ladder/collectives.py"


def test_each_collective_moves_the_bytes_of_its_definition(shown):
    rows = re.findall(r"^(\w+): .+\n((?:  rank .+\n)+)", shown(LINE), re.MULTILINE)
    cells = {name: [row[9:].split("->") for row in text.splitlines()] for name, text in rows}
    before, after = (
        {name: [list(map(int, each[side].split())) for each in own] for name, own in cells.items()}
        for side in (0, 1)
    )
    held = [[10 * rank + part for part in range(4)] for rank in range(4)]
    sums = [sum(column) for column in zip(*held, strict=True)]
    firsts = [own[0] for own in held]
    assert after == {
        "broadcast": [held[0]] * 4,
        "all_reduce": [sums] * 4,
        "scatter": [[each] for each in held[0]],
        "gather": [firsts, [], [], []],
        "reduce_scatter": [[each] for each in sums],
        "all_gather": [firsts] * 4,
    }
    assert all(each in (held, [[first] for first in firsts]) for each in before.values())
