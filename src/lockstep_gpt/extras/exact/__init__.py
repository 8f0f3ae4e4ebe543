"""The same bits on any number of devices: all gradients of a step are added in one order."""

# Group of settings -> what it takes with this extra.
SETTINGS = {"batch": ".extras.exact.exact_settings:ExactBatch"}
CHECK = ".extras.exact.exact_settings:refuse_other_sums"
CHECK_BATCH = ".extras.exact.sizes:refuse_others"
CALLBACK = ".extras.exact.gradient_sums:gradient_sums"
RECEIPT = ".extras.exact.sizes:sums_line"
# Sums of gradients that a rank keeps beside its gradients.
GRADIENT_COPIES = ".extras.exact.sizes:gradient_copies"
