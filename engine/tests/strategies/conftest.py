"""Runs that measure what each rank keeps of a model."""

import json

import pytest

MEASURE = """
import json, lightning
class Measure(lightning.Callback):
    def on_train_end(self, trainer, module):
        (optimizer,) = trainer.optimizers
        held = [*module.parameters(), *(each for state in optimizer.state.values()
                for each in state.values())]
        size = sum(getattr(each, "_local_tensor", each).nbytes for each in held)
        with open(f"held-{trainer.global_rank}.json", "w") as file:
            json.dump(size, file)
"""


@pytest.fixture(scope="session")
def train_measured():
    """Train in `run` while ranks measure what they keep; return the output."""

    def train(command, *words):
        (command.folder / "measure.py").write_text(MEASURE)
        measure = "+callbacks.measure._target_=measure.Measure"
        words = (*words, measure, "callbacks.sample.length=300", "run_dir=run")
        return command.train(*words, PYTHONPATH=str(command.folder)).stdout

    return train


@pytest.fixture(scope="session")
def held():
    """Return the bytes of a rank's weights and moments, once `train_measured` has ended."""

    def read(command, rank):
        return json.loads((command.folder / f"held-{rank}.json").read_text())

    return read
