"""A recorded run on two ranks, and its pages in a browser."""

import fcntl
import json
from pathlib import Path

import pytest

from lockstep.metrics.file import MetricsFile
from lockstep.pages.recordings import read_recordings

COMPILED = [
    "precision=bf16-mixed",
    "compile=true",
    "batch.micro_size=2",
    "model.n_layer=1",
    "callbacks=[default,sync_panel]",
    "callbacks.sync_panel.every=10",
    "callbacks.sample.length=1",
]


@pytest.fixture(scope="session")
def recorded(finished, shared):
    """The two-rank run of the README again, in `runs/recorded`, with every third step recorded."""
    command, _ = finished
    screen = shared / "recorded.screen"
    with screen.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not screen.exists():
            words = command.smoke(
                "trainer=cpu",
                "trainer.devices=2",
                "strategy=ddp",
                "strategy.process_group_backend=gloo",
                "callbacks=[default,sync_panel]",
                "callbacks.sync_panel.every=3",
                "run_dir=runs/recorded",
            )
            screen.write_text(command(*words).stdout)
    return command.folder / "runs/recorded", screen.read_text()


@pytest.fixture
def fitted(new_run, tmp_path):
    """Fit a run of one rank and two micro-batches per step, in `tmp_path`; return its model."""

    def fit(*callbacks, model=None, **settings):
        run = new_run(**settings)
        file = MetricsFile(tmp_path / "metrics.csv", [])
        run.module.model = model or run.module.model
        file.truncate_after(0)
        run.fit(*callbacks, logger=file)
        return run.module.model

    return fit


@pytest.fixture
def record_compiled(command):
    """Record a compiled run in two micro-batches per step; return its recordings."""

    def train(*words, **environment):
        screen = command.train(*COMPILED, *words, "run_dir=run", **environment).stdout
        assert screen.count("compiled: the first step took") == 1
        recordings = read_recordings(command.folder / "run")
        steps = [(recording["accumulation"], recording["spread"]) for recording in recordings]
        assert steps == 3 * [(2, 0.0)]
        return recordings

    return train


@pytest.fixture
def recordings(recorded):
    paths = sorted((recorded[0] / "sync").iterdir())
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


@pytest.fixture
def show(watched):
    """Show a file in the browser; check that it logged nothing and sent no network requests."""
    tab, messages, requests = watched

    def open_file(path: Path, width: int = 1280, **media: str):
        tab.set_viewport_size({"width": width, "height": 800})
        tab.emulate_media(**{"reduced_motion": "reduce", "color_scheme": "light", **media})
        tab.goto(path.as_uri())
        return tab

    yield open_file
    assert messages == []
    assert all(url.startswith("file:") and url.endswith(".html") for url in requests)
