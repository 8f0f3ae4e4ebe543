"""Settings that this extra adds to `checkpoint`."""

from dataclasses import dataclass

from lockstep_gpt.config import CheckpointConfig, setting


@dataclass
class CopiedCheckpoints(CheckpointConfig):
    """Checkpoints written in the background, or to a second location."""

    background: bool = setting(
        "copy the state in memory, and write the copy while training continues", False
    )
    copy_to: str | None = setting("also keep checkpoints in this folder or fsspec URL", None)
