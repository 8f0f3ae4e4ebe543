"""Trains a GPT on any number of devices."""

from pathlib import Path

from lockstep.project import Command, Project, begin

_PACKAGE = Path(__file__).resolve().parent
# The folder of the YAML files: in an installed package, else in the source tree.
CONFIGS = (
    _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parents[1] / "configs"
)
# What the engine's commands know of this project.
PROJECT = begin(
    Project(
        program="lockstep-gpt",
        package=__name__,
        version="0.3.0",  # as in pyproject.toml
        configs=CONFIGS,
        train="lockstep_gpt.train:main",
        commands={
            "evaluate": Command("lockstep_gpt.evaluate:main", "measure on held-out data", False),
            "generate": Command("lockstep_gpt.generate:main", "continue a prompt", False),
            "export": Command("lockstep_gpt.export:main", "export for transformers", False),
        },
    )
)
