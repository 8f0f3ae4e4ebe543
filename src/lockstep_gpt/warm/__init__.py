"""Warm ranks: one process of a run imports everything, and agents and ranks are forks of it."""
