"""Agents and ranks as forks of one process that has imported everything."""

SERVERS = ".extras.warm.server"  # what `launch/start.py` starts agents by
CHECK_START = ".extras.warm.server:refuse_impossible"
