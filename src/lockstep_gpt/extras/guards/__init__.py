"""What ends a run that does harm: replicas that differ, no steps, code of somebody else's."""

# Group of settings -> what it takes with this extra.
SETTINGS = {"guard": ".extras.guards.guards_settings:HarmGuard"}
BEFORE_JOIN = ".extras.guards.watching:record_collectives"
PERMIT = ".extras.guards.trust:permit"
CALLBACK = ".extras.guards.watching:Guards"
