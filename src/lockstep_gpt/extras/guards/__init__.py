"""Guards against harm: replicas that differ, steps that don't end, code from someone else."""

# Group of settings -> its class with this extra.
SETTINGS = {"guard": ".extras.guards.guards_settings:HarmGuard"}
BEFORE_JOIN = ".extras.guards.local_store:prepare"
PERMIT = ".extras.guards.trust:permit"
CALLBACK = ".extras.guards.watching:Guards"
