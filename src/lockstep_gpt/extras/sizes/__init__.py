"""One setting for size: shape, batch, budget and rates follow from `model.size`, and a loss."""

# Group of settings -> what it takes with this extra.
SETTINGS = {"model": ".extras.sizes.sizes_settings:SizedModel"}
WORDS = ".extras.sizes.by_size:with_rules"
RECEIPT = ".extras.sizes.law:lines"
# The loss that a run is expected to end at, and what that rests on.
EXPECTED_LOSS = ".extras.sizes.law:expected"
