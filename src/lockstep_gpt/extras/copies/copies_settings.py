"""Settings that this extra adds to `checkpoint`."""

from dataclasses import dataclass

from lockstep_gpt.config import CheckpointConfig, setting


@dataclass
class CopiedCheckpoints(CheckpointConfig):
    """Checkpoints written in the background, or to a second location."""

    background: bool = setting(
        "write from a copy while training continues; needs memory for it", False
    )
    copy_to: str | None = setting("also keep them in this folder or fsspec URL", None)
