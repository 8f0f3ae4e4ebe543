"""The same bits on any number of devices: all gradients of a step are added in one order."""

# Group of settings -> its class with this extra.
SETTINGS = {"batch": ".extras.exact.exact_settings:ExactBatch"}
CHECK = ".extras.exact.exact_settings:refuse_other_sums"
CHECK_BATCH = ".extras.exact.sizes:refuse_others"
CALLBACK = ".extras.exact.gradient_sums:gradient_sums"
RECEIPT = ".extras.exact.sizes:sums_line"
# Number of gradient sums that a rank keeps in addition to its gradients.
GRADIENT_COPIES = ".extras.exact.sizes:gradient_copies"
