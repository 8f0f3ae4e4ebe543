"""Trains a GPT on any number of devices."""

PROGRAM = "lockstep-gpt"
VERSION = "0.2.0"  # as in pyproject.toml
