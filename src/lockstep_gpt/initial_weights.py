"""`init_from`: begins a run with the weights of another run, or of a transformers folder."""

import logging
from pathlib import Path

import lockstep
from lightning import LightningDataModule, LightningModule
from lockstep.checkpoints.same_shape import is_run, weights_of_run
from lockstep.checkpoints.weights import set_weights

from lockstep_gpt.language_model import LanguageModel

logger = logging.getLogger(__name__)

# What decides the function that the weights are of, besides their shapes.
SHAPE = ("n_layer", "n_head", "n_kv_head", "n_embd", "bias", "ngram_rows", "longest_ngram")
POSITIONS = "position_embedding.weight"


def load_initial_weights(
    init_from: str | Path, module: LightningModule, data: LightningDataModule
) -> None:
    """Load weights into a module that has not begun to train; every rank must call this.

    Args:
        init_from: a run, a checkpoint in one, or, for our models, a folder of transformers.
        module: of which the attribute `model` is one of our models; of another one, all weights
            are loaded.
        data: of the run, whose tokenizer must be that of the weights.

    Raises:
        UserError: there is no such run or folder, its shape or vocabulary differs, or the ranks
            read different weights.
    """
    path = Path(init_from).expanduser()
    model = getattr(module, "model", None)
    if not isinstance(model, LanguageModel):
        lockstep.load_weights(path, module)
        return
    where = f"init_from={path}"
    tokenizer = getattr(data, "tokenizer", None)
    if is_run(path):
        weights, saved = weights_of_run(path, model, tokenizer, where, SHAPE, POSITIONS)
    else:
        from lockstep.hub import weights_of_folder  # late: few runs need it

        from lockstep_gpt.layouts import layout_of

        layout = layout_of(model, where)
        weights, saved = weights_of_folder(path, model, tokenizer, layout, where)
    set_weights(model, weights, where)
    logger.info("weights of %s, %s of %s positions", path, f"{model.block_size:,}", f"{saved:,}")
