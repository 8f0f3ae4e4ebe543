"""The keys under which a rank keeps its shards of a state; torch isn't imported."""

SHARDS = "shards"  # nested as in the state
SHAPES = "shapes"  # name of a weight -> shape of the whole
