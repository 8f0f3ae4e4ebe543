"""Trains a GPT on any number of devices."""

import os
from pathlib import Path

PROGRAM = "lockstep-gpt"
VERSION = "0.2.0"  # as in pyproject.toml

# For GNU OpenMP, which reads it when torch is imported: a thread that waits for others leaves its
# core to other programs sooner. With its own value, 300,000, steps on a busy machine take many
# times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_PACKAGE = Path(__file__).resolve().parent
# The folder of the YAML files: in an installed package, else in the source tree.
CONFIGS = (
    _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parents[1] / "configs"
)
