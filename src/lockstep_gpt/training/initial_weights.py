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
from lockstep_gpt.distributed.ranks import ranks_unlike_rank_zero
from lockstep_gpt.errors import UserError
from lockstep_gpt.model.gpt import GPT
from lockstep_gpt.model.model_settings import ModelConfig
from lockstep_gpt.registry import optional_part
from lockstep_gpt.run.trained_model import load_named_model
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
        weights, saved_context = weights_of_run(path, model, tokenizer, source)
    else:
        pretrained = optional_part("hub", "pretrained")
        if pretrained is None:
            raise UserError(
                f"{source} is neither a run nor a checkpoint in one; name one. A transformers "
                f"folder needs {how_to_add('hub')}"
            )
        weights, saved_context = pretrained.weights_of_folder(path, model, tokenizer, source)
    model.load_state_dict(weights)
    _refuse_other_weights(model, source)
    context = model.config.block_size
    logger.info("weights of %s, %s of %s positions", path, f"{context:,}", f"{saved_context:,}")


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
    _, saved_model, saved_config, saved_tokenizer = load_named_model(path, is_plain=True)
    _refuse_other_shape(saved_config.model, model.config, source)
    weights = saved_model.state_dict()
    saved_context = saved_config.model.block_size
    if POSITIONS in weights:
        if saved_context < model.config.block_size:
            raise UserError(
                f"{source} has learned positions for {saved_context} tokens, and model.block_size="
                f"{model.config.block_size}; set model.block_size={saved_context}"
            )
        weights[POSITIONS] = weights[POSITIONS][: model.config.block_size]
    if not is_vocabulary_of(tokenizer, saved_tokenizer.vocab_size) or not _encode_alike(
        saved_tokenizer, tokenizer
    ):
        raise UserError(
            f"{source} has another tokenizer than the data; prepare the data with its own, "
            f"data.tokenizer={path} where the source of data has that"
        )
    places = model.state_dict()
    for name in set(PADDED) & weights.keys():
        rows = weights[name][: saved_tokenizer.vocab_size]
        weights[name] = with_rows(rows, places[name], model.vocab_size, tokenizer.end_of_text)
    return weights, saved_context


def _refuse_other_shape(saved: ModelConfig, config: ModelConfig, source: str) -> None:
    names = [*SHAPE]
    if config.ngram_rows:
        names.append(LONGEST)
    for name in names:
        saved_value = getattr(saved, name)
        value = getattr(config, name)
        if saved_value != value:
            raise UserError(
                f"{source} has {name}={as_typed(saved_value)}, and model.{name}={as_typed(value)}; "
                f"set model.{name}={as_typed(saved_value)}"
            )


def is_vocabulary_of(tokenizer: Tokenizer, size: int) -> bool:
    """Return whether `size` counts the tokenizer's tokens, or all but the last special ones."""
    vocab_size = tokenizer.vocab_size
    if size >= vocab_size:
        return size == vocab_size
    added_tokens = json.loads(tokenizer.to_dict().get("json", "{}")).get("added_tokens", ())
    special_ids = {token["id"] for token in added_tokens if token["special"]}
    return special_ids.issuperset(range(size, vocab_size))


def with_rows(weight: Tensor, place: Tensor, vocab_size: int, model_id: int | None) -> Tensor:
    """Add rows to `weight`, (tokens, C), for tokens that it lacks, up to the rows of `place`.

    Tokens up to `vocab_size` start as copies of the token `model_id`, or of the first one. The
    rows of padding are zeros.
    """
    copied = weight[[model_id or 0]].expand(vocab_size - len(weight), -1)
    padding = weight.new_zeros(len(place) - vocab_size, weight.shape[1])
    return torch.cat([weight, copied, padding])


def _encode_alike(first: Tokenizer, second: Tokenizer) -> bool:
    """Return whether two tokenizers give the same ids for text; without text, whether equal."""
    if first.end_of_text is None or second.end_of_text is None:
        return first.to_dict() == second.to_dict()
    return bool(first.encode(PROBE).tolist() == second.encode(PROBE).tolist())
