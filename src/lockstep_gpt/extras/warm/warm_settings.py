"""Settings that this extra adds to `launch`."""

from dataclasses import dataclass

from lockstep_gpt.config import LaunchConfig, setting


@dataclass
class WarmLaunch(LaunchConfig):
    """Ranks forked from one process."""

    warm: bool | None = setting("import once and fork all ranks; null: where possible", None)
