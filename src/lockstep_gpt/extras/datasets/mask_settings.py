"""Settings of models that see one document at a time; commands read them without torch."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep_gpt.config import Config
from lockstep_gpt.settings import ExtraSettings, setting


@dataclass
class DocumentSettings(ExtraSettings):
    """Attention within documents."""

    node: ClassVar[str] = "documents"
    on_resume: ClassVar[str] = "kept"
    mask: bool = setting("attention, positions, and n-grams stay within one document", False)


def refuse_impossible(config: Config) -> None:
    """Raise a `UserError` for dropout that tensor ranks can't draw as one device does."""
    documents = DocumentSettings.of(config)
    if documents.mask and config.tensor_parallel > 1 and config.model.dropout:
        documents.refuse(
            "mask",
            f"with model.dropout={config.model.dropout} does not work with "
            f"strategy.tensor_parallel={config.tensor_parallel}; set one of them to its default",
        )
