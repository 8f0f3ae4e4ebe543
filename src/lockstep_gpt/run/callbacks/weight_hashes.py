"""The SHA-256 of the weights of each checkpoint, to compare runs bit for bit."""

import hashlib
from typing import Any

import torch
from lightning import Callback, Trainer


class WeightHashes(Callback):
    """Keeps the hashes of a run in every checkpoint and in the summary."""

    def __init__(self) -> None:
        # Step of each checkpoint ever saved -> hash.
        self.weights: dict[int, str] = {}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:  # noqa: ARG002
        """Add the hash of this checkpoint, if it contains the whole model."""
        if not trainer.is_global_zero:
            return
        sha256 = digest(checkpoint["state_dict"])
        if sha256 is not None:
            self.weights[trainer.global_step] = sha256
            checkpoint["weights"] = dict(self.weights)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:  # noqa: ARG002
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
