"""`trainer=mps`: a Mac's GPU, which `auto` also uses."""

ACCELERATOR = ".extras.apple.choosing:accelerator"
CALLBACK = ".extras.apple.training:callback"
CHECK_START = ".extras.apple.choosing:refuse_impossible"
