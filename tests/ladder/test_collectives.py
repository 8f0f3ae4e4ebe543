"""Collectives on real ranks do what their definitions say."""

import pytest


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("ranks", [3])
def test_each_collective_moves_what_its_definition_says(ranks):
    import collectives

    tables = dict(
        zip(
            [each.__name__ for each in collectives.COLLECTIVES],
            collectives.run(ranks, "gloo"),
            strict=True,
        )
    )
    held = [[10.0 * rank + part for part in range(ranks)] for rank in range(ranks)]
    sums = [sum(column) for column in zip(*held, strict=True)]
    firsts = [own[0] for own in held]
    assert all(before in (held, [[each] for each in firsts]) for before, _ in tables.values())
    assert {name: after for name, (_, after) in tables.items()} == {
        "broadcast": [held[0]] * ranks,
        "all_reduce": [sums] * ranks,
        "scatter": [[each] for each in held[0]],
        "gather": [firsts, *([[]] * (ranks - 1))],
        "reduce_scatter": [[each] for each in sums],
        "all_gather": [firsts] * ranks,
    }
