"""`trainer=mps`: the GPU of a Mac, which `auto` takes as well."""

ACCELERATOR = ".extras.apple.choosing:accelerator"
CALLBACK = ".extras.apple.training:callback"
CHECK_START = ".extras.apple.choosing:refuse_impossible"
