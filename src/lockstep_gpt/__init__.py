"""Trains a GPT on any number of devices."""

PROGRAM = "lockstep-gpt"
VERSION = "0.1.0"  # as in pyproject.toml
