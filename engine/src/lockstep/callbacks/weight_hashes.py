"""The SHA-256 of the weights of each checkpoint, to compare runs bit for bit."""

import hashlib
from typing import Any

import torch
from lightning import Callback


class WeightHashes(Callback):
    """Keeps the hashes of a run, which what writes checkpoints adds to each, for the summary."""

    def __init__(self) -> None:
        # Step of each checkpoint ever saved -> hash.
        self.weights: dict[int, str] = {}

    def added_to(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return `checkpoint` with its own hash and all earlier ones, if it has the whole model.

        This takes seconds for a large model: in background, the thread that writes calls it.
        """
        sha256 = digest(checkpoint["state_dict"])
        if sha256 is None:
            return checkpoint
        self.weights = {**self.weights, checkpoint["global_step"]: sha256}
        return {**checkpoint, "weights": self.weights}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Restore the hashes of earlier parts of the run."""
        self.weights = dict(checkpoint.get("weights", {}))

    def in_summary(self, _step: int) -> dict[str, Any]:
        """Return the hashes for `summary.json`."""
        return {"weights": self.weights}


def digest(weights: dict[str, Any]) -> str | None:
    """Return the SHA-256 of all names, types, shapes, and bits; None for a sharded model."""
    sha256 = hashlib.sha256()
    for name, weight in weights.items():
        if type(weight) is not torch.Tensor:
            return None
        sha256.update(f"{name} {weight.dtype} {[*weight.shape]} ".encode())
        sha256.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha256.hexdigest()
