"""The last states of a run in memory, from which killed ranks go on."""
