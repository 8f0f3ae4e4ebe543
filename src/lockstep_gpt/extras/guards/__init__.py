"""What ends a run whose replicas differ, or that makes no step any more."""

# Group of settings -> what it takes with this extra.
SETTINGS = {"guard": ".extras.guards.guards_settings:HarmGuard"}
BEFORE_JOIN = ".extras.guards.watching:record_collectives"
CALLBACK = ".extras.guards.watching:Guards"
