"""Settings of warm starts."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep_gpt.settings import ExtraSettings, setting


@dataclass
class WarmSettings(ExtraSettings):
    """Ranks forked from one process."""

    node: ClassVar[str] = "warm"
    on_resume: ClassVar[str] = "machine"
    enabled: bool | None = setting(
        "import once and fork all ranks (Linux; not under torchrun or srun); null: where possible",
        None,
    )
