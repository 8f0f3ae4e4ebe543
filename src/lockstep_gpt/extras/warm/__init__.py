"""Agents and ranks as forks of one process that has imported everything."""

# Group of settings -> what it takes with this extra.
SETTINGS = {"launch": ".extras.warm.warm_settings:WarmLaunch"}
SERVERS = ".extras.warm.server"  # what `launch/start.py` starts agents by
CHECK_START = ".extras.warm.server:refuse_impossible"
