"""What commands do with the source of a configuration.

`prepare` creates its token files before a run needs them; a plan asks for its vocabulary.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import tempfile
from dataclasses import replace
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep import processes, project, stop_signals
from lockstep.building import build
from lockstep.errors import UserError
from lockstep.launch import composed, targets
from lockstep.launch.main import Jobs
from lockstep.logs import LEVELS, log_to_stdout
from lockstep.settings import check_choice
from lockstep.tokens.prepare import prepare
from lockstep.tokens.recipe import recipe_of
from lockstep.tokens.shards import check_block_size, load_index
from lockstep.tokens.tokenizer import ByteTokenizer
from lockstep.tokens.tokenizer_files import GPT2, GPT2_SIZE

HELP = """\
usage: PROGRAM prepare [--verify] [data=CHOICE] [data.source.SETTING=VALUE ...]
Tokenize a dataset, as PROGRAM train does if needed, with the same settings.
--verify compares existing token files with their SHA-256."""
VERIFY = "--verify"


@log_to_stdout()
def main(words: list[str]) -> int:
    """Prepare the tokens that these settings describe, or those of each job of a sweep."""
    ours = project.current()
    if "--help" in words:
        print(re.sub(r"PROGRAM (\w+)", lambda found: ours.typed(found[1]), HELP))
        return 0
    processes.name_program(sys.modules["__main__"], processes.typed("prepare"))
    stop_signals.install(has_keyboard=True).interrupt()
    settings = [word for word in words if word != VERIFY]
    jobs = Jobs(partial(_prepare, verify=VERIFY in words), settings)
    source = composed.Source(_prepare, str(ours.configs), ours.config_name, "1.3")
    with tempfile.TemporaryDirectory() as folder:  # for what Hydra itself writes
        places = [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"]
        words = composed.with_overrides(settings, places)
        composed.call(source, composed.for_hydra(words), jobs.run)
    return jobs.status


def _prepare(config: DictConfig, verify: bool) -> tuple[int, Any]:
    """Prepare the tokens of one configuration; return the exit status and no value."""
    check_choice("verbosity", config.verbosity, tuple(LEVELS))
    logging.getLogger().setLevel(LEVELS[config.verbosity])
    data = config.data
    if "source" not in data:
        raise UserError(
            f"data._target_={data['_target_']} has no source of tokens, so there is nothing to "
            f"prepare; choose another data, as in {project.typed('prepare')} data=stdlib"
        )
    values: Any = OmegaConf.to_container(config, resolve=True)
    targets.refuse_mistakes({"data": {"source": values["data"]["source"]}})
    source = replace(build(data.source), root=data.root, fingerprint=data.fingerprint)
    folder = prepare(source, verify, tell=True)
    check_block_size(load_index(folder), data.block_size)
    if data.packing is not None:
        build(data.packing).prepare(folder, data.block_size)
    return 0, math.nan


def vocab_size_of(source: DictConfig) -> int:
    """Return the number of token ids of a node `data.source`.

    Raises:
        UserError: a setting that chooses the text is missing.
    """
    size: int | None = source.get("vocab_size")
    tokenizer = source.get("tokenizer")
    if size is not None:
        return size
    if tokenizer == ByteTokenizer.kind:
        return ByteTokenizer.vocab_size
    if tokenizer in GPT2:
        return GPT2_SIZE  # without its files
    missing = sorted(OmegaConf.missing_keys(source))
    if missing:
        raise UserError(f"{missing[0]}=??? leaves the text open; set it")
    built = build(source)
    known: int | None = getattr(built, "vocab_size", None)
    return known or recipe_of(built).tokenizer.vocab_size
