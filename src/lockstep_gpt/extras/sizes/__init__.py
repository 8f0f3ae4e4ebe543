"""One setting for size: `model.size` decides shape, batch, budget, rates, and expected loss."""

# Group of settings -> its class with this extra.
SETTINGS = {"model": ".extras.sizes.sizes_settings:SizedModel"}
WORDS = ".extras.sizes.by_size:with_rules"
RECEIPT = ".extras.sizes.law:lines"
# The expected final loss of a run, and the basis for it.
EXPECTED_LOSS = ".extras.sizes.law:expected"
