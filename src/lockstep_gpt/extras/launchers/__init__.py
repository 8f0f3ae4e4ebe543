"""A launcher, torchrun for one, starts the ranks: each is a process of its own that joins it."""

LAUNCHED = ".extras.launchers.places:as_launched"
JOIN_LAUNCHER = ".extras.launchers.joining:join"
RANKS_MET = ".extras.launchers.joining:refuse_other_directory"
