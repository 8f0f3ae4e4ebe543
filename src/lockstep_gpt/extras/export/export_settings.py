"""What `model` takes beside the core's."""

from dataclasses import dataclass

from lockstep_gpt.config import ModelConfig, setting


@dataclass
class ImportedModel(ModelConfig):
    """Weights from elsewhere."""

    init_from: str | None = setting(
        "folder of weights to begin with; null: random ones", None, on_resume="free"
    )
