"""Ranks that a launcher such as torchrun starts: each is a separate process that joins it."""

LAUNCHED = ".extras.launchers.places:as_launched"
JOIN_LAUNCHER = ".extras.launchers.joining:join"
RANKS_MET = ".extras.launchers.joining:refuse_other_directory"
