"""A source distribution contains these tests, but not the lab."""

from pathlib import Path

collect_ignore_glob = [] if (Path(__file__).parents[3] / "lab").is_dir() else ["*"]
