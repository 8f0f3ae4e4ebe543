"""Start agents and ranks as forks of a process that has imported everything."""

# Group of settings -> its settings with this extra.
SETTINGS = {"launch": ".extras.warm.warm_settings:WarmLaunch"}
SERVERS = ".extras.warm.server"  # `launch/start.py` starts agents with it
CHECK = ".extras.warm.server:refuse_impossible"
