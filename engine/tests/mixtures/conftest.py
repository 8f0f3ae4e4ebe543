"""Small corpora for mixtures."""

import numpy as np
import pytest

from lockstep.mixtures.mixture import Mixture
from lockstep.tokens.sources.text import Text

KILL = """
import os, signal, lightning
class Kill(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        last = trainer.global_rank == trainer.world_size - 1
        if trainer.global_step == 13 and last and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
"""
LETTERS = {"code": "xyz", "poems": "aeiou", "prose": "klmnop"}


@pytest.fixture
def corpora(tmp_path):
    """Write three corpora of random letters; return a function that mixes some of them."""
    sizes = {"code": 30_000, "poems": 2_000, "prose": 9_000}
    for name, letters in LETTERS.items():
        text = np.random.default_rng(len(letters)).choice([*letters, " "], sizes[name])
        (tmp_path / name).write_text("".join(text))

    def mixed(names="code poems prose", sources=None, **changes):
        configs = {
            name: Text(path=str(tmp_path / name), val_fraction=0.2) for name in names.split()
        }
        others = {
            name: Text(**source) if isinstance(source, dict) else source
            for name, source in (sources or {}).items()
        }
        weights = dict.fromkeys(configs, 1.0) if not {"weights", "epochs"} & {*changes} else {}
        settings = {"root": str(tmp_path / "data"), "weights": weights, **changes}
        return Mixture(sources={**configs, **others}, **settings)

    return mixed


@pytest.fixture
def single(tmp_path):
    """Return the settings of one of the corpora alone."""

    def settings(name):
        options = {"path": str(tmp_path / name), "val_fraction": 0.2}
        return Text(root=str(tmp_path / "data"), **options)

    return settings


@pytest.fixture
def train_and_kill(command):
    """Return a function that trains, and kills the last rank once, in step 13."""
    (command.folder / "killer.py").write_text(KILL)

    def run(*words):
        kill = "+callbacks.kill._target_=killer.Kill"
        return command.train(*words, kill, PYTHONPATH=str(command.folder))

    return run
