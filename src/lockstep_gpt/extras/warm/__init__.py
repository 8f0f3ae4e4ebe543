"""Start agents and ranks as forks of a process that has imported everything."""

SETTINGS = {"warm": ".extras.warm.warm_settings:WarmSettings"}
CHECK = ".extras.warm.server:refuse_impossible"
