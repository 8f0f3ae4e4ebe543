"""Recorded steps of a model that torch's own compiler compiles, which takes longest."""

import pytest
from torch._inductor import config as inductor

# Each further process imports torch, and vectors take the compiler twice as long.
QUICKLY = {"compile_threads": 1, "cpp.simdlen": 1}


@pytest.mark.slow
def test_steps_compiled_by_inductor_are_recorded_on_one_rank(record_compiled):
    with inductor.patch(QUICKLY):  # pytest's monkeypatch deletes `simdlen` at its end
        # Without validation, which would compile a second graph, as on two ranks.
        record_compiled("batch.global_size=4", "+trainer.limit_val_batches=0")
