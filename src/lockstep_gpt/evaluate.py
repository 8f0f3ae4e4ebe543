"""`lockstep-gpt evaluate RUN`: metrics of held-out data, or the loss of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.checkpoints.reading import read_checkpoint, with_newest
from lockstep.errors import UserError
from lockstep.run.directory import RunDirectory
from omegaconf import DictConfig, OmegaConf

from lockstep_gpt.trained_model import SAMPLES, model_of, parser_of, refuse_foreign

SPLITS = {"val": "validation", "test": "the test split"}


def main(arguments: list[str]) -> int:
    """Print what validation or test steps log; of the GPT, also how well it compresses text.

    Started by torchrun, each rank evaluates its part, and rank 0 prints.
    """
    parser = parser_of("evaluate", "Measure a trained module on held-out data, or on any text.")
    add = parser.add_argument
    add("--split", choices=(*SPLITS,), default="val", help="of the run's data (default: val)")
    add("--data", help="text instead: a file, a folder, a glob, or a URL")
    size = f"samples at a time (default: {SAMPLES}; of a module of your own: as in training)"
    add("--batch-size", type=int, help=size)
    add("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(arguments)
    if options.batch_size is not None and options.batch_size < 1:
        raise UserError(f"--batch-size={options.batch_size} must be at least 1")
    path, content = with_newest(options.source, lambda path: (path, read_checkpoint(path)))
    cfg = None
    if options.data is None:
        cfg = configuration(path, content, options.trust)
    from lockstep_gpt import measure  # late, so that mistakes are reported at once

    with measure.joined_ranks() as ranks:
        if cfg is not None:
            result = measure.of_split(cfg, path, content, options.split, options.batch_size)
        else:
            model, _, tokenizer = model_of(path, content, options.trust)
            result = measure.of_text(model, tokenizer, options.data, options.batch_size or SAMPLES)
    if ranks.rank == 0:
        _print(path, result, options.data or SPLITS[options.split], as_json=options.json)
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
