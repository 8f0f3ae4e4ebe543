"""A run directory with one checkpoint of a tiny model with random weights."""

import pytest
import torch

from lockstep_gpt.config import ModelConfig
from lockstep_gpt.model.gpt import GPT
from lockstep_gpt.training.callbacks.checkpoints import AtomicCheckpointIO
from lockstep_gpt.training.checkpoint import checkpoint_path

SHAPE = {"block_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 16}


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Run tests of tiny tensors on one thread; a second core may be busy with other work."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory):
    """Return a function that saves a model for `tokenizer` as if it was trained on `data`."""

    def save(tokenizer, **data):
        torch.manual_seed(0)
        model = GPT(ModelConfig(**SHAPE, dropout=0.5), tokenizer.vocab_size)
        for parameter in model.parameters():
            parameter.data.mul_(5)  # far from uniform, so choices differ
        content = {
            "config": {
                "max_steps": 1,
                "batch": {"global_size": 1},
                "model": {**SHAPE, "dropout": 0.5},
                "data": data,
                "optim": {"algorithm": "adamw"},
            },
            "tokenizer": tokenizer.to_dict(),
            "state_dict": {f"model.{name}": each for name, each in model.state_dict().items()},
        }
        run = tmp_path_factory.mktemp("run")
        AtomicCheckpointIO().save_checkpoint(content, checkpoint_path(run / "checkpoints", 1))
        return run

    return save
