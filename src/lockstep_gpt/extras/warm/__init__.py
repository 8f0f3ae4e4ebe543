"""Agents and ranks as forks of one process that has imported everything."""

SERVERS = "lockstep_gpt.extras.warm.server"  # what `launch/start.py` starts agents by
CHECK_START = "lockstep_gpt.extras.warm.server:refuse_impossible"
