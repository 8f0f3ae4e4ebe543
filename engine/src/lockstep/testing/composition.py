"""Checks that choices of a project's settings compose, and name what exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lockstep.errors import UserError
from lockstep.launch.composed import as_argument
from lockstep.launch.targets import refuse_mistakes

MISSING = "???"  # a value that a user, or another choice, must give


def choices(folder: str | Path) -> list[str]:
    """Return each `GROUP=CHOICE` that has a YAML file in a folder of settings.

    Args:
        folder: with a folder per group.
    """
    root = Path(folder)
    files = [path.relative_to(root).with_suffix("") for path in sorted(root.rglob("*.yaml"))]
    groups = [file for file in files if len(file.parts) > 1 and file.parts[0] != "hydra"]
    return [f"{file.parent.as_posix()}={file.name}" for file in groups]


def assert_composes(folder: str | Path, *overrides: str, config_name: str = "train") -> None:
    """Assert that settings compose, and that each `_target_` has the arguments that they give it.

    Nothing is built, so what may not be installed or is large costs nothing. The default
    experiment is left out, unless one is among the overrides: its values are for its own choices.

        assert_composes(CONFIGS, "experiment=smoke", "optim.lr=0.01")

    Args:
        folder: of the YAML files.
        overrides: as on the command line.
        config_name: name of the main file.

    Raises:
        AssertionError: a class or an argument doesn't exist, or a value has another kind.
    """
    words = [*overrides]
    if _has_experiment(Path(folder, f"{config_name}.yaml")):
        words += [] if any(word.startswith("experiment=") for word in words) else ["~experiment"]
    with initialize_config_dir(str(Path(folder).resolve()), **as_argument("1.3")):
        values = OmegaConf.to_container(compose(config_name, words))
    try:
        refuse_mistakes(_given(values), {"*": ("*",)})
    except UserError as mistake:
        raise AssertionError(f"{' '.join(overrides)}: {mistake}") from None


def _has_experiment(main_file: Path) -> bool:
    """Return whether a main file chooses an experiment by default."""
    defaults = OmegaConf.select(OmegaConf.load(main_file), "defaults", default=[])
    return any(OmegaConf.is_dict(choice) and "experiment" in choice for choice in defaults)


def _given(node: Any) -> Any:
    """Return settings without those that have no value yet."""
    if isinstance(node, dict):
        return {name: _given(value) for name, value in node.items() if value != MISSING}
    if isinstance(node, list):
        return [_given(value) for value in node]
    return node
