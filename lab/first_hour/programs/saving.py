"""Time the saving of a model of 124 million parameters with AdamW's state."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from clock import DEVICE, DRY, seconds_of, show
from lockstep.callbacks.weight_hashes import digest
from lockstep.checkpoints.reading import size_of, write_checkpoint
from lockstep.checkpoints.writing import CopyingCheckpointIO

from lockstep_gpt.gpt import GPT
from lockstep_gpt.optim import adamw


def main() -> None:
    """Print a row for each way."""
    n_layer, n_head, n_embd = (2, 2, 64) if DRY else (12, 12, 768)
    with torch.device(DEVICE):
        model = GPT(50257, block_size=1024, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
    optimizer = adamw(model.named_parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    content = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    size = size_of(content) / 1e9
    with tempfile.TemporaryDirectory(dir=os.environ["FIRST_HOUR_OUT"]) as folder:
        path = Path(folder) / "step=000001.ckpt"
        took = seconds_of(lambda: write_checkpoint(content, path))
        show("write", f"{took:.2f} s for {size:.2f} GB")
        took = seconds_of(lambda: digest(content["state_dict"]))
        show("hash of the weights", f"{took:.2f} s")
        disk = CopyingCheckpointIO(background=True)
        for number in ("first", "second"):
            took = seconds_of(lambda: disk.save_checkpoint(content, path))
            disk.wait()
            show(f"pause for a {number} background save", f"{took:.2f} s")


if __name__ == "__main__":
    main()
