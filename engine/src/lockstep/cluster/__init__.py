"""Checks the machines, and breaks small runs on purpose."""
