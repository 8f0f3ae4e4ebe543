"""Trains a GPT on any number of devices."""

import os

PROGRAM = "lockstep-gpt"
VERSION = "0.2.0"  # as in pyproject.toml

# For GNU OpenMP, which reads it when torch is imported: a thread that waits for others leaves its
# core to other programs sooner. With its own value, 300,000, steps on a busy machine take many
# times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
