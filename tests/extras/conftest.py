"""The runs in miniature of tests/training, for extras too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

TRAINING = Path(__file__).parents[1] / "training/conftest.py"


def _fixtures() -> dict[str, object]:
    spec = importlib.util.spec_from_file_location("training_conftest", TRAINING)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


_TRAINING = _fixtures()
folder, new_run, on_ranks = (_TRAINING[name] for name in ("folder", "new_run", "on_ranks"))
records, read_offline = (_TRAINING[name] for name in ("records", "read_offline"))
