"""The command with its own mounts, and a browser for pages."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lockstep_gpt.data import Tokens

from lockstep.loading.loaders import TrainLoader
from lockstep.tokens.prepared import Packing
from lockstep.tokens.sources.source import Source

# The command with its own mounts, as `unshare --mount` would start it, without a new Python.
APART = """
import ctypes, os, subprocess
import lockstep_gpt
from lockstep import commands as cli
def main(words):
    if ctypes.CDLL(None, use_errno=True).unshare(0x20000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    for line in ("mount --make-rprivate /", os.environ["MOUNTS"]):
        subprocess.run(line, shell=True, check=True)
    return cli.main(words)
"""


@pytest.fixture
def apart(command: Any) -> Callable[..., Any]:
    """Start the command after a shell line with mounts that only it sees."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can give a process mounts of its own")

    def start(mounts: str, *words: str, **environment: str) -> Any:
        (command.folder / "apart.py").write_text(APART)
        place = {"PYTHONPATH": str(command.folder), "MOUNTS": mounts}
        return command.start(*words, target="apart:main", **place, **environment)

    return start


class Resumed(Tokens):
    """The data after so many samples."""

    samples = 0

    def train_dataloader(self) -> TrainLoader:
        """Return the loader of a resumed run."""
        loader = super().train_dataloader()
        loader.load_state_dict({"step": 0, "samples": self.samples})
        return loader


@pytest.fixture
def module_of() -> Callable[..., Tokens]:
    """Return one rank's data module of a source, as after a resume at so many samples."""

    def make(
        source: Source,
        rank: int = 0,
        world: int = 1,
        samples: int = 0,
        packing: Packing | None = None,
        **changes: Any,
    ) -> Tokens:
        shape = {"block_size": 16, "batch": 4, "seed": 5, **changes}
        module = Resumed(source, **shape, packing=packing, root=source.root)
        module.samples = samples
        device = SimpleNamespace(root_device=torch.device("cpu"))
        places: dict[str, Any] = {"global_step": 0, "max_steps": 100}
        places |= {"max_epochs": None, "min_epochs": None}
        places["accumulate_grad_batches"] = 1
        places["distributed_sampler_kwargs"] = {"rank": rank, "num_replicas": world}
        stages = dict.fromkeys(("validating", "sanity_checking", "testing"), False)
        module.trainer = SimpleNamespace(strategy=device, **places, **stages)
        return module

    return make


@pytest.fixture(scope="session")
def tab() -> Iterator[Any]:
    """A page of a real browser, for all tests: each new page starts processes, which takes long."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no chromium on this machine; Debian's package is `chromium`")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path)
        yield browser.new_page()
        browser.close()


@pytest.fixture
def watched(tab: Any) -> Iterator[tuple[Any, list[str], list[str]]]:
    """The tab, the lines that it logs, and the URLs that it requests in a test."""
    said: list[str] = []
    asked: list[str] = []
    listeners: dict[str, Callable[[Any], None]] = {
        "console": lambda message: said.append(message.text),
        "pageerror": lambda error: said.append(str(error)),
        "request": lambda request: asked.append(request.url),
    }
    for event, listener in listeners.items():
        tab.on(event, listener)
    yield tab, said, asked
    for event, listener in listeners.items():
        tab.remove_listener(event, listener)
    tab.goto("about:blank")
