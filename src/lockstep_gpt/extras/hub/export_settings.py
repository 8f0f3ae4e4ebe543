"""Settings that this extra adds to `model`."""

from dataclasses import dataclass

from lockstep_gpt.config import ModelConfig, setting


@dataclass
class ImportedModel(ModelConfig):
    """Initial weights from a run or a folder."""

    init_from: str | None = setting(
        "run, checkpoint, or folder with initial weights; null: random", None, on_resume="free"
    )
