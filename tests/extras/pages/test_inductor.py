"""Recorded steps of a model that torch's own compiler compiles, which takes longest."""

from torch._inductor import config as inductor


def test_steps_compiled_by_inductor_are_recorded_on_one_rank(record_compiled, monkeypatch):
    monkeypatch.setattr(inductor, "compile_threads", 1)  # each further process imports torch
    monkeypatch.setattr(inductor.cpp, "simdlen", 1)  # vectors take the compiler twice as long
    # Without validation, which would compile a second graph, as on two ranks.
    record_compiled("batch.global_size=4", "+trainer.limit_val_batches=0")
