"""`trainer=mps`: the GPU of a Mac, which `auto` takes as well."""

ACCELERATOR = ".extras.apple.choosing:accelerator"
CHECK_START = ".extras.apple.choosing:refuse_impossible"
