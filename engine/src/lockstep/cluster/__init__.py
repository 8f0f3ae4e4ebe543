"""Predicts a run, checks the machines, and breaks small runs on purpose."""
