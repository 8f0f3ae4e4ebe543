"""`lockstep-gpt evaluate RUN`: metrics of held-out data, or the loss of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep import evaluation
from omegaconf import DictConfig

SAMPLES = 32  # of the GPT, at a time


def main(arguments: list[str]) -> int:
    """Print what validation or test steps log; of the GPT, also how well it compresses text."""
    samples = f"{SAMPLES}; of a module of your own: as in training"
    about = "Measure a trained module on held-out data, or on any text."
    parser = evaluation.parser_of(about, samples)
    parser.add_argument("--data", help="text instead: a file, a folder, a glob, or a URL")
    options = evaluation.parsed(parser, arguments)
    if options.data is None:
        return evaluation.evaluate(options, of_split)
    path, content = evaluation.newest(options.source)

    def of_text() -> dict[str, Any]:
        from lockstep_gpt.trained_model import model_of  # late: it needs torch

        model, _, tokenizer = model_of(path, content, options.trust)
        size = options.batch_size or SAMPLES
        return evaluation.of_text(model, tokenizer, options.data, size, model.block_size)

    return evaluation.show(path, options.data, of_text, options)


def of_split(
    cfg: DictConfig,
    checkpoint: Path,
    content: dict[str, Any],
    split: str = "val",
    batch_size: int | None = None,
) -> dict[str, Any]:
    """Return what a trained module logs on a split of its run's data, as the engine measures it.

    Of the GPT: `val/loss` in nats per token, and `val/perplexity`, or `test/...`; the number of
    targets, `tokens`; and, if the split is text whose tokens are all targets, `bits_per_byte`.
    """
    from lockstep_gpt.data import Tokens
    from lockstep_gpt.module import GPTModule, count_targets
    from lockstep_gpt.trained_model import OUR_MODULE, mask_as_trained

    is_ours = cfg.module.get("_target_") == OUR_MODULE
    usual = SAMPLES if is_ours else None
    trained = evaluation.Trained(cfg, checkpoint, content, batch_size or usual)
    module, data = trained.module, trained.data
    if isinstance(module, GPTModule):
        mask_as_trained(cfg, module.model, getattr(data, "tokenizer", None))
    if not is_ours:  # a class derived from it may have other batches, and log another loss
        return trained.measured(split)
    result = trained.measured(split, count_targets)
    if isinstance(data, Tokens):
        bits = data.prepared.bits_per_byte(split, result[f"{split}/loss"], result["tokens"])
        return result if bits is None else {**result, "bits_per_byte": bits}
    return result
