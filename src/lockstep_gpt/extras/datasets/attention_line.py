"""What the receipt of a run tells of attention within documents."""

from __future__ import annotations

from lightning import Callback

from lockstep_gpt.config import Config
from lockstep_gpt.extras.datasets.attention import uses_blocks
from lockstep_gpt.extras.datasets.mask import needs_one_graph
from lockstep_gpt.model.functional import SHORT
from lockstep_gpt.training.advice import PLAIN_PRODUCTS, fused_attention


class AttentionLine(Callback):
    """Names what computes attention within documents, in place of the usual kernel."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def receipt_lines(self) -> dict[str, str]:
        """Return the name."""
        return {"attention": f"{attention_in_documents(self.config)}, within documents"}


def attention_in_documents(config: Config) -> str:
    """Return how training computes attention within documents; see `attention_within`."""
    model = config.model
    device = config.trainer.get("accelerator", "cpu")
    if uses_blocks(device == "cuda", model.dropout, model.block_size):
        return "FlexAttention"
    if device != "cpu" or needs_one_graph(config):
        return fused_attention(config, is_masked=True)
    if model.block_size <= SHORT:
        return PLAIN_PRODUCTS
    return f"{PLAIN_PRODUCTS}, {fused_attention(config)} for long documents"
