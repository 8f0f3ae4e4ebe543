"""Checks the machines: the `doctor`."""
