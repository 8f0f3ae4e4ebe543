"""Loader processes on machines without memory that they could share."""

from types import SimpleNamespace

import pytest

from lockstep_gpt.config import UserError
from lockstep_gpt.extras.sources import shared_memory
from lockstep_gpt.extras.sources.text import StdlibData

FILLER = """
import lightning
class FillSharedMemory(lightning.Callback):
    def setup(self, *_, **__):
        with open("/dev/shm/filler", "wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
"""


@pytest.mark.parametrize(
    ("mount", "cause"), [("size=16k", "No space left on device"), ("ro", "Read-only file system")]
)
def test_loader_processes_without_shared_memory_are_rejected_in_one_line(
    command, with_shared_memory, mount, cause
):
    assert with_shared_memory(mount, "data.num_workers=2") == (
        2,
        "lockstep-gpt train: "
        f"data.num_workers=2 needs 133,184 bytes of /dev/shm ({cause}); "
        "set data.num_workers=0, or start the container with --shm-size=8g\n",
    )
    assert not (command.folder / "run").exists()


def test_without_loader_processes_no_shared_memory_is_asked_for(monkeypatch):
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", "/nowhere")
    rest = {"trainer": {}, "model": SimpleNamespace(block_size=32)}
    rest["batch"] = SimpleNamespace(micro_size=None, global_size=2)
    shared_memory.refuse_missing(SimpleNamespace(data=StdlibData(), **rest))
    config = SimpleNamespace(data=StdlibData(num_workers=1), **rest)
    with pytest.raises(UserError, match=r"of /nowhere \(No such file or directory\); set data\.n"):
        shared_memory.refuse_missing(config)


def test_a_negative_number_of_workers_is_rejected():
    with pytest.raises(UserError, match=r"data\.num_workers=-1 must be at least 0"):
        StdlibData(num_workers=-1)


def test_a_dev_shm_that_fills_is_explained(command, with_shared_memory):
    (command.folder / "filler.py").write_text(FILLER)
    fill = "+callbacks.filler._target_=filler.FillSharedMemory"
    status, said = with_shared_memory("size=1m", "data.num_workers=2", fill)
    assert status == 1
    assert said.startswith("cause   workers of the data loader cannot hand over batches")
