"""A recorded run on two ranks, and a browser for its pages."""

import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep_gpt.runtime.metrics_file import MetricsFile


@pytest.fixture(scope="session")
def recorded(two, shared):
    """The two-rank run of the README again, in `runs/recorded`, with every third step recorded."""
    command, _ = two
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
        run, file = new_run(**settings), MetricsFile(tmp_path / "metrics.csv", [])
        run.module.model = model or run.module.model
        file.begin(0)
        run.fit(*callbacks, logger=file)
        return run.module.model

    return fit


@pytest.fixture
def recordings(recorded):
    paths = sorted((recorded[0] / "sync").iterdir())
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """A real browser, without a window."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no chromium on this machine; Debian's package is `chromium`")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture
def show(browser):
    """Open a file as a page; check that it logged nothing and sent no network requests."""
    opened, said, asked = [], [], []

    def open_page(path: Path, **context):
        opened.append(browser.new_context(**{"reduced_motion": "reduce", **context}))
        page = opened[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in opened:
        context.close()
    assert said == []
    assert all(url.startswith("file:") and url.endswith(".html") for url in asked)
