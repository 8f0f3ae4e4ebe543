"""`evaluate RUN`: what the validation or test steps of any trained module log."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep.checkpoints.reading import read_checkpoint, with_newest
from lockstep.command_line import OneLineParser, parser_of_run
from lockstep.errors import UserError
from lockstep.run.directory import RunDirectory
from lockstep.run.trust import refuse_foreign

SPLITS = {"val": "validation", "test": "the test split"}
# Of a configuration, a checkpoint's path and content, a split, and samples at a time or None.
Measure = Callable[[DictConfig, Path, dict[str, Any], str, int | None], dict[str, Any]]


def main(arguments: list[str]) -> int:
    """Print what validation or test steps log.

    Started by torchrun, each rank evaluates its part, and rank 0 prints.
    """

    def of_split(*of_run: Any) -> dict[str, Any]:
        from lockstep.evaluation import measure  # late, so that mistakes are reported at once

        return measure.of_split(*of_run)

    parser = parser_of("Measure a trained module on held-out data.")
    return evaluate(parsed(parser, arguments), of_split)


def parser_of(description: str, samples: str = "as in training") -> OneLineParser:
    """Return the command's parser, to which a project may add arguments.

    Args:
        description: of the command.
        samples: how many it takes at a time by default.
    """
    parser = parser_of_run("evaluate", description)
    add = parser.add_argument
    add("--split", choices=(*SPLITS,), default="val", help="of the run's data (default: val)")
    add("--batch-size", type=int, help=f"samples at a time (default: {samples})")
    add("--json", action="store_true", help="print one line of JSON")
    return parser


def parsed(parser: OneLineParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line; a `UserError` if one is out of range."""
    options = parser.parse_args(arguments)
    if options.batch_size is not None and options.batch_size < 1:
        raise UserError(f"--batch-size={options.batch_size} must be at least 1")
    return options


def newest(source: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path and the content of a run's newest checkpoint, or of the one named."""
    return with_newest(source, lambda path: (path, read_checkpoint(path)))


def evaluate(options: argparse.Namespace, of_split: Measure) -> int:
    """Measure a split of a run's data, and print the result; return the exit status."""
    path, content = newest(options.source)
    cfg = configuration(path, content, options.trust)
    chosen = (options.split, options.batch_size)
    return show(path, SPLITS[options.split], lambda: of_split(cfg, path, content, *chosen), options)


def show(
    checkpoint: Path,
    place: str,
    measure: Callable[[], dict[str, Any]],
    options: argparse.Namespace,
) -> int:
    """Measure on all ranks that torchrun has started, and print the result on rank 0.

    Args:
        checkpoint: that is measured.
        place: what it is measured on, for people.
        measure: returns values by name; every rank calls it.
        options: of the command line.
    """
    from lockstep.evaluation.measure import joined_ranks  # late: it needs torch

    with joined_ranks() as ranks:
        result = measure()
    if ranks.rank == 0:
        _print(checkpoint, result, place, as_json=options.json)
    return 0


def _print(checkpoint: Path, result: dict[str, Any], place: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"checkpoint": str(checkpoint), **result}))
        return
    tokens = f"{result['tokens']:,} tokens of " if "tokens" in result else ""
    print(f"{checkpoint} on {tokens}{place}")
    values = {name: value for name, value in result.items() if name != "tokens"}
    width = max([14, *(len(name) + 2 for name in values)])
    for name, value in values.items():
        print(f"  {name:<{width}}{value:.4f}")


def configuration(checkpoint: Path, content: dict[str, Any], trusted: bool = False) -> DictConfig:
    """Return the configuration of a checkpoint's run, to evaluate all of its data.

    Args:
        checkpoint: its path; a run's own configuration is next to its folder.
        content: of the checkpoint.
        trusted: whether classes may be used that only the configuration names.

    Raises:
        UserError: it names no data and module, or classes of someone else.
    """
    run = RunDirectory(checkpoint.parent.parent)
    values = run.placed() if run.config.is_file() else content["config"]
    refuse_foreign(checkpoint, values, ["data", "module"], trusted)
    cfg = OmegaConf.create(values)
    for name in ("data", "module"):
        if not isinstance(cfg.get(name), DictConfig):
            raise UserError(f"{checkpoint} has no {name} to evaluate with; name another run")
    if "val_tokens" in cfg.data:
        cfg.data.val_tokens = None
    if "fingerprint" in cfg.data:  # the tokens that it was trained on
        states = [state for state in content.values() if isinstance(state, dict)]
        found = [state["fingerprint"] for state in states if state.get("fingerprint")]
        cfg.data.fingerprint = found[0] if found else cfg.data.fingerprint
    return cfg
