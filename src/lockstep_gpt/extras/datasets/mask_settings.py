"""Settings of models that see one document at a time; commands read them without torch."""

from dataclasses import dataclass

from lockstep_gpt.config import ModelConfig, setting


@dataclass
class MaskedModel(ModelConfig):
    """Attention within documents."""

    mask_documents: bool = setting(
        "attention, positions, and n-grams stay within one document", False
    )
