"""Recorded steps of a model that torch's own compiler compiles, which takes longest."""

import json

from torch._inductor import config as inductor

COMPILED = [
    "precision=bf16-mixed",
    "compile=true",
    "batch.micro_size=2",
    "model.n_layer=1",
    "callbacks=[default,sync_panel]",
    "callbacks.sync_panel.every=10",
    "callbacks.sample.length=1",
]


def recorded_in(folder):
    paths = sorted((folder / "sync").iterdir())
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def test_steps_compiled_by_inductor_are_recorded_on_one_rank(command, monkeypatch):
    monkeypatch.setattr(inductor, "compile_threads", 1)  # each further process imports torch
    monkeypatch.setattr(inductor.cpp, "simdlen", 1)  # vectors take the compiler twice as long
    one = ["batch.global_size=4", "+trainer.limit_val_batches=0"]  # a second graph, as on two ranks
    said = command.train(*COMPILED, *one, "run_dir=run").stdout
    assert said.count("compiled: the first step took") == 1
    recordings = recorded_in(command.folder / "run")
    assert [(each["accumulation"], each["spread"]) for each in recordings] == 3 * [(2, 0.0)]
