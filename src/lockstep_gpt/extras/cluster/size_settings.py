"""Settings of `model=auto`."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep_gpt.extras.cluster.rules import parsed
from lockstep_gpt.settings import ExtraSettings, setting


@dataclass
class SizeSettings(ExtraSettings):
    """The model's size, and what follows from it."""

    node: ClassVar[str] = "size"
    on_resume: ClassVar[str] = "kept"
    weights: str | None = setting(
        "weights in the blocks, such as 300k or 1M, from which model=auto derives other settings",
        None,
    )
    law: str | None = setting(
        "file of the command size_law, to predict the loss; null: our own fit",
        None,
        on_resume="free",
    )

    def __post_init__(self) -> None:
        """Also check that the size is a number of weights."""
        super().__post_init__()
        if self.weights is not None:
            parsed(self.weights)
