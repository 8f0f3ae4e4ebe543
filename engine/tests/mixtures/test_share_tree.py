"""The tree of a mixture's sources keeps each near its share."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from lockstep.mixtures.share_tree import MOST, Leaf, share_tree


def bounds(shares, node, above=0):
    """Yield by how many windows each source of a tree may be off its share, as the module says."""
    if isinstance(node, Leaf):
        yield (1 + shares[node.source] * above) / 2
        return
    for side in (node.left, node.right):
        sources = (side.source,) if isinstance(side, Leaf) else side.sources
        total = sum(shares[source] for source in sources)
        is_leaf = isinstance(side, Leaf)
        yield from bounds(shares, side, above if is_leaf else above + 1 / total)


def sources_of(node):
    if isinstance(node, Leaf):
        return [node.source]
    assert sorted(node.sources) == sorted(sources_of(node.left) + sources_of(node.right))
    assert sorted(node.left_sources) == sorted(sources_of(node.left))
    return sorted(node.sources)


weights = st.lists(st.integers(1, 10**6), min_size=1, max_size=12)


@given(weights)
def test_every_source_is_within_the_bound(numbers):
    shares = [Fraction(number, sum(numbers)) for number in numbers]
    tree = share_tree(shares)
    assert sources_of(tree) == [*range(len(numbers))]
    largest = max(bounds(shares, tree))
    assert largest <= (1 if len(numbers) <= 4 else MOST)


@given(weights, weights)
def test_sources_without_a_share_are_left_out(present, absent):
    shares = [Fraction(number, sum(present)) for number in present]
    tree = share_tree([Fraction(0)] * len(absent) + shares)
    assert sources_of(tree) == [*range(len(absent), len(absent) + len(present))]


def test_255_sources_are_within_the_bound():
    numbers = [1 + (number * 7919) % 1000 for number in range(255)]
    shares = [Fraction(number, sum(numbers)) for number in numbers]
    assert max(bounds(shares, share_tree(shares))) <= MOST
