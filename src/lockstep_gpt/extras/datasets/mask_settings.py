"""Settings of models that see one document at a time; commands read them without torch."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep_gpt.settings import ExtraSettings, setting


@dataclass
class DocumentSettings(ExtraSettings):
    """Attention within documents."""

    node: ClassVar[str] = "documents"
    on_resume: ClassVar[str] = "kept"
    mask: bool = setting("attention, positions, and n-grams stay within one document", False)
