"""`model.init_from`: starts a run from the weights of another run, or of a transformers folder.

Every rank reads them; a resumed run doesn't.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from torch import Tensor

from lockstep_gpt.catalog import how_to_add
from lockstep_gpt.distributed.ranks import ranks_unlike_rank_zero
from lockstep_gpt.errors import UserError
from lockstep_gpt.model.language_model import LanguageModel
from lockstep_gpt.model.model_settings import ModelConfig
from lockstep_gpt.registry import optional_part
from lockstep_gpt.settings import as_typed
from lockstep_gpt.tokens.tokenizer import Tokenizer
from lockstep_gpt.training.trained_model import load_named_model

logger = logging.getLogger(__name__)

SHAPE = ("architecture", "n_layer", "n_head", "n_kv_head", "n_embd", "bias", "ngram_rows")
LONGEST = "longest_ngram"
POSITIONS = "position_embedding.weight"  # a shorter context uses the first rows
# Two tokenizers that give the same ids for this text differ in the rarest words at most.
PROBE = "def f(x):\n    return 12345 + x  # naïve, isn't it?\n\tTokens tokenized: 漢字 😀 theory\n"


def load_initial_weights(config: ModelConfig, model: LanguageModel, tokenizer: Tokenizer) -> None:
    """Load the weights that `model.init_from` names, if it is set.

    Raises:
        UserError: there is no such run or folder, its architecture, shape, or vocabulary differs,
            or the ranks read different weights.
    """
    if config.init_from is None:
        return
    path = Path(config.init_from).expanduser()
    source = f"model.init_from={path}"
    if is_run(path):
        weights, saved_context = weights_of_run(path, config, tokenizer, source)
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
    context = model.block_size
    logger.info("weights of %s, %s of %s positions", path, f"{context:,}", f"{saved_context:,}")


def _refuse_other_weights(model: LanguageModel, source: str) -> None:
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
    path: Path, config: ModelConfig, tokenizer: Tokenizer, source: str
) -> tuple[dict[str, Tensor], int]:
    """Return the weights of a run for a model of `config`, and the run's context.

    Raises:
        UserError: the run's shape or tokenizer differs; the message starts with `source`.
    """
    _, saved_model, saved_config, saved_tokenizer = load_named_model(path)
    _refuse_other_shape(saved_config.model, config, source)
    weights = saved_model.state_dict()
    saved_context = saved_config.model.block_size
    if POSITIONS in weights:
        if saved_context < config.block_size:
            raise UserError(
                f"{source} has learned positions for {saved_context} tokens, and model.block_size="
                f"{config.block_size}; set model.block_size={saved_context}"
            )
        weights[POSITIONS] = weights[POSITIONS][: config.block_size]
    if not _encode_alike(saved_tokenizer, tokenizer):
        raise UserError(
            f"{source} has another tokenizer than the data; prepare the data with its own, "
            f"data.tokenizer={path} where the source of data has that"
        )
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


def _encode_alike(first: Tokenizer, second: Tokenizer) -> bool:
    """Return whether two tokenizers give the same ids for text; without text, whether equal."""
    if first.vocab_size != second.vocab_size:
        return False
    if first.end_of_text is None or second.end_of_text is None:
        return first.to_dict() == second.to_dict()
    return bool(first.encode(PROBE).tolist() == second.encode(PROBE).tolist())
