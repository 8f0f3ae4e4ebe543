"""`model.init_from`: starts a run from the weights of another run, or of a transformers folder.

Every rank reads them; a resumed run doesn't.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import torch
from torch import Tensor

from lockstep_gpt.catalog import how_to_add
from lockstep_gpt.data.tokenizer import Tokenizer
from lockstep_gpt.errors import UserError
from lockstep_gpt.model.gpt import GPT
from lockstep_gpt.registry import optional_part
from lockstep_gpt.run.checkpoint import find_checkpoint
from lockstep_gpt.run.resuming import ranks_unlike_rank_zero
from lockstep_gpt.run.trained_model import load_model
from lockstep_gpt.settings import as_typed

logger = logging.getLogger(__name__)

SHAPE = ("architecture", "n_layer", "n_head", "n_kv_head", "n_embd", "bias", "ngram_rows")
LONGEST = "longest_ngram"
PADDED = ("token_embedding.weight", "output.weight")  # they have more rows than the vocabulary
POSITIONS = "position_embedding.weight"  # a shorter context uses the first rows
# Two tokenizers that give the same ids for this text differ in the rarest words at most.
PROBE = "def f(x):\n    return 12345 + x  # naïve, isn't it?\n\tTokens tokenized: 漢字 😀 theory\n"


def load_initial_weights(model: GPT, tokenizer: Tokenizer) -> None:
    """Load the weights that `model.init_from` names, if it is set.

    Raises:
        UserError: there is no such run or folder, its architecture, shape, or vocabulary differs,
            or the ranks read different weights.
    """
    if model.config.init_from is None:
        return
    path = Path(model.config.init_from).expanduser()
    source = f"model.init_from={path}"
    if is_run(path):
        weights, longest = weights_of_run(path, model, tokenizer, source)
    else:
        pretrained = optional_part("hub", "pretrained")
        if pretrained is None:
            raise UserError(
                f"{source} is neither a run nor a checkpoint in one; name one. A transformers "
                f"folder needs {how_to_add('hub')}"
            )
        weights, longest = pretrained.weights_of_folder(path, model, tokenizer, source)
    model.load_state_dict(weights)
    _refuse_other_weights(model, source)
    context = model.config.block_size
    logger.info("weights of %s, %s of %s positions", path, f"{context:,}", f"{longest:,}")


def _refuse_other_weights(model: GPT, source: str) -> None:
    """Compare the weights that the ranks read: a folder can look shared without being shared."""
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.contiguous().numpy())
    others = ranks_unlike_rank_zero(digest.hexdigest())
    if others:
        raise UserError(
            f"{source} has other weights for rank {others} than for rank 0; name a "
            "folder that is the same on all nodes"
        )


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
    found, config, theirs = load_model(find_checkpoint(path), is_plain=True)
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


def may_have(size: int, tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer has so many tokens, or that many and special ones after them."""
    ours, added = tokenizer.vocab_size, json.loads(tokenizer.to_dict().get("json", "{}"))
    special = {each["id"] for each in added.get("added_tokens", ()) if each["special"]}
    return size == ours or (size < ours and special.issuperset(range(size, ours)))


def grown(weight: Tensor, place: Tensor, vocab_size: int, like: int | None = None) -> Tensor:
    """Pad `weight`, whose rows are tokens, to the rows of `place` with zeros.

    Tokens up to `vocab_size` that it lacks begin as copies of the token `like`.
    """
    new = weight[[0 if like is None else like]].expand(vocab_size - len(weight), -1)
    return torch.cat([weight, new, weight.new_zeros(len(place) - vocab_size, weight.shape[1])])


def _alike(theirs: Tokenizer, ours: Tokenizer) -> bool:
    is_text = theirs.end_of_text is not None and ours.end_of_text is not None
    if not is_text:
        return theirs.to_dict() == ours.to_dict()
    return bool(theirs.encode(PROBE).tolist() == ours.encode(PROBE).tolist())
