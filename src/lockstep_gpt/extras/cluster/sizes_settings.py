"""Settings of `model`, next to the core's."""

from dataclasses import dataclass

from lockstep_gpt.config import ModelConfig, setting
from lockstep_gpt.extras.sizes.rules import parsed


@dataclass
class SizedModel(ModelConfig):
    """The model's size, and what follows from it."""

    size: str | None = setting(
        "number of block weights, such as 300k or 1M, from which model=auto derives other "
        "settings; null: derive none",
        None,
    )
    size_law: str | None = setting(
        "file from scripts/size_law.py for predicting the loss; null: the project's own fit",
        None,
        on_resume="free",
    )

    def __post_init__(self) -> None:
        """Also check that the size is a number of weights."""
        super().__post_init__()
        if self.size is not None:
            parsed(self.size)
