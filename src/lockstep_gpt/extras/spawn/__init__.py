"""`strategy=ddp_spawn`: ranks that one process spawns, for notebooks and debuggers."""

# strategy.start_method -> what starts the ranks and returns the run's exit status.
START_RANKS = {"spawn": ".extras.spawn.spawning:start"}
CHECK_START = ".extras.spawn.refusal:refuse_launcher"
