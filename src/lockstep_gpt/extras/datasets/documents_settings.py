"""Settings that this extra adds to `data` and `model`."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep_gpt.config import Config, ModelConfig, check, setting


@dataclass
class PackedData:
    """How documents fill windows (samples)."""

    # No subclass of `DataConfig`: its defaults would replace those of each source.
    node: ClassVar[str] = "data"
    on_resume: ClassVar[str] = "kept"
    packing: str = setting(
        "stream: the next block_size tokens; documents: best-fit packing of whole documents",
        "stream",
        choices=("stream", "documents"),
    )


@dataclass
class MaskedModel(ModelConfig):
    """Attention within documents."""

    mask_documents: bool = setting(
        "attention, positions, and n-grams stay within one document", False
    )


def is_packed(data: object) -> bool:
    """Return whether the settings of `data` ask for windows of whole documents."""
    return getattr(data, "packing", "stream") == "documents"


def refuse_processes(config: Config) -> None:
    """Raise a `UserError` for loader processes, which only read windows in file order."""
    if not is_packed(config.data):
        return
    workers = getattr(config.data, "num_workers", 0)
    rule = "has no data.packing=documents; set data.num_workers=0, or data.packing=stream"
    check("data.num_workers", workers, not workers, rule)
