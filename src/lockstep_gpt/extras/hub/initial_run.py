"""`model.init_from=RUN`: starts a run from the weights of another, or of one of its checkpoints."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from lockstep_gpt.config import UserError, as_typed
from lockstep_gpt.data.tokenizer import Tokenizer
from lockstep_gpt.extras.export.layouts import PADDED, POSITIONS, grown, may_have
from lockstep_gpt.inference.trained_model import load_model
from lockstep_gpt.model.gpt import GPT
from lockstep_gpt.registry import asked
from lockstep_gpt.run.checkpoint import find_checkpoint

SHAPE = ("architecture", "n_layer", "n_head", "n_kv_head", "n_embd", "bias", "ngram_rows")
LONGEST = "longest_ngram"


def is_run(path: Path) -> bool:
    """Return whether `path` is a run directory or a checkpoint."""
    return path.is_file() or (path / "checkpoints").is_dir()


def weights_of_run(
    path: Path, model: GPT, tokenizer: Tokenizer, source: str
) -> tuple[dict[str, Tensor], int]:
    """Return the weights of a run with the shapes of `model`, and the run's context.

    Raises:
        UserError: the run's shape or tokenizer differs; the message starts with `source`.
    """
    found, config, theirs = load_model(find_checkpoint(path))
    asked("MERGE", found)
    ours, names = model.config, (*SHAPE, *((LONGEST,) if model.config.ngram_rows else ()))
    for name in names:
        if (was := getattr(config.model, name)) != getattr(ours, name):
            is_now, right = (as_typed(each) for each in (getattr(ours, name), was))
            raise UserError(
                f"{source} has {name}={right}, and model.{name}={is_now}; set model.{name}={right}"
            )
    longest = config.model.block_size
    if POSITIONS in found.state_dict() and longest < ours.block_size:
        raise UserError(
            f"{source} has learned positions for {longest} tokens, and model.block_size="
            f"{ours.block_size}; set model.block_size={longest}"
        )
    if not may_have(theirs.vocab_size, tokenizer) or not _alike(theirs, tokenizer):
        raise UserError(
            f"{source} has another tokenizer than the data; prepare the data with its own, "
            f"data.tokenizer={path} where the source of data has that"
        )
    saved, places = found.state_dict(), model.state_dict()
    for name in set(PADDED) & saved.keys():
        rows = saved[name][: theirs.vocab_size]
        saved[name] = grown(rows, places[name], model.vocab_size, tokenizer.end_of_text)
    if POSITIONS in saved:
        saved[POSITIONS] = saved[POSITIONS][: ours.block_size]
    return saved, longest


def _alike(theirs: Tokenizer, ours: Tokenizer) -> bool:
    from lockstep_gpt.extras.export.initial_weights import PROBE

    is_text = theirs.end_of_text is not None and ours.end_of_text is not None
    if not is_text:
        return theirs.to_dict() == ours.to_dict()
    return bool(theirs.encode(PROBE).tolist() == ours.encode(PROBE).tolist())
