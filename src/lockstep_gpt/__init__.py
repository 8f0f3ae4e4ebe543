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
        train=f"{__name__}.train:main",
        small=("experiment=smoke",),  # what `check` and `drill` train
        commands={
            "evaluate": Command(f"{__name__}.evaluate:main", "measure on held-out data", False),
            "generate": Command(f"{__name__}.generate:main", "continue a prompt", False),
            "export": Command(f"{__name__}.export:main", "export for transformers", False),
        },
    )
)
