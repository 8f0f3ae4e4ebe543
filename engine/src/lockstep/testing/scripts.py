"""Runs of any Lightning script, which has no settings of ours, on several numbers of ranks.

Lightning gives each Trainer the callbacks of the entry points `lightning.pytorch.callbacks_factory`
(https://lightning.ai/docs/pytorch/stable/extensions/entry_points.html). A check has one, in a
folder that only its own processes import from: see `watching`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.exits import Exit
from lockstep.launch.script import is_program
from lockstep.ranks.address import LOOPBACK
from lockstep.settings import counted
from lockstep.testing.diagnosis import Recording, read_recording
from lockstep.testing.experiment import LIMIT, RANKS, SECONDS_TO_END, FailedRunError, failure_of
from lockstep.testing.results import Results

FOLDER = "LOCKSTEP_CHECK_FOLDER"  # the variable: the folder for what a run leaves
ASKED = "LOCKSTEP_CHECK_RANKS"  # the variable: on how many ranks it is to train
STEPS = "LOCKSTEP_CHECK_STEPS"  # the variable: after how many optimizer steps it stops
OUTCOME = "outcome.pt"
TRAINED_ON = "ranks"  # the file: on how many ranks a Trainer trains, if not as many as asked
LOG = "the log"
LOGS = "{logs}"  # in a word of the command: the folder for what ranks print
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--rdzv-backend=c10d",
    f"--rdzv-endpoint={LOOPBACK}:0",
    f"--local-addr={LOOPBACK}",
    f"--nproc-per-node={RANKS}",
    "--redirects=3",  # each rank's output to files, without torchrun's own
    f"--log-dir={LOGS}",
)
ENTRY_POINT = "[lightning.pytorch.callbacks_factory]\ncheck = lockstep.testing.watching:callbacks\n"
METADATA = "Metadata-Version: 2.1\nName: lockstep-check\nVersion: 0\n"


def script_of(main: str | Sequence[str], arguments: Sequence[str] = ()) -> Path | None:
    """Return the script that a command runs if it has no settings of ours.

    It has them if `lockstep.main` decorates a function in it, or if no word of a command is to say
    the number of ranks, which then is a setting.
    """
    words = [main] if isinstance(main, str) else main
    paths = [Path(word) for word in words if word.endswith(".py")]
    says_ranks = isinstance(main, str) or any(RANKS in word for word in (*words, *arguments))
    if not paths or not says_ranks or is_program(paths[0]):
        return None
    return paths[0]


def refuse_kill(main: str | Sequence[str], kill_after: int | None) -> None:
    """Raise a `UserError` if a script is to be killed: nothing would continue it."""
    if kill_after is not None:
        raise UserError(
            f"kill_after={kill_after} needs a run that continues by itself, and {main} doesn't; "
            "let lockstep.main decorate its function, or leave out kill_after"
        )


class ScriptRuns:
    """Trainings of a script that differ only in their number of ranks.

    Args:
        main: the script's path, which torchrun then starts, or the words of a command with
            `{ranks}` in one of them.
        arguments: of the script.
        folder: for what the runs leave; an existing one.
        steps: after how many optimizer steps they stop; None: where the script does.
    """

    def __init__(
        self, main: str | Sequence[str], arguments: Sequence[str], folder: Path, steps: int | None
    ) -> None:
        words = [*TORCHRUN, main] if isinstance(main, str) else [*main]
        self._words = [*words, *arguments]
        self._folder = folder
        self._steps = steps
        self._imported = folder / "imported"
        about = self._imported / "lockstep_check-0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(METADATA, encoding="utf-8")
        (about / "entry_points.txt").write_text(ENTRY_POINT, encoding="utf-8")

    def results(self, name: str, ranks: int, after: int | None) -> Results:
        """Train on so many ranks; return the results, or raise a `FailedRunError`."""
        assert after is None  # `refuse_kill`
        folder = self._folder / name
        folder.mkdir()
        output = self._folder / f"{name}.output"
        with output.open("w", encoding="utf-8") as stream:
            process = subprocess.Popen(
                [
                    word.replace(RANKS, str(ranks)).replace(LOGS, str(folder))
                    for word in self._words
                ],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=self._environment(folder, ranks),
                start_new_session=True,
            )
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            late = f"the script on {counted(ranks, 'rank')} had not ended after {LIMIT} s"
            raise FailedRunError(f"{late} and was stopped", 1) from None
        finally:
            _end(process)
        self._refuse_other_ranks(folder, ranks)
        if process.returncode:
            raise failure_of(
                f"the script on {counted(ranks, 'rank')}", _of_failed(folder) or output, process
            )
        if not (folder / OUTCOME).is_file():
            raise FailedRunError(
                f"{self._words}: the script ended, and no Trainer has trained a step; call "
                "Trainer.fit in it",
                2,
            )
        return results_in(folder)

    def recording(self, name: str, ranks: int, after: int | None) -> Recording:
        """Return what each step of a run was computed from."""
        return read_recording(self._folder / name)

    def batch(self, name: str) -> Mapping[str, Any]:
        """Return nothing: what batches a script makes, it says nowhere."""
        return {}

    def refuse_inexact(self, name: str) -> None:
        """Refuse nothing: whether bits are equal, the comparison tells."""

    def _refuse_other_ranks(self, folder: Path, asked: int) -> None:
        """Raise a `FailedRunError` if the script's Trainer ignored the number of ranks."""
        path = folder / TRAINED_ON
        if not path.is_file():
            return
        script = next((word for word in self._words if word.endswith(".py")), "the script")
        raise FailedRunError(
            f"{script} is to train on {counted(asked, 'rank')}, and its Trainer trains on "
            f"{path.read_text(encoding='utf-8')}, so nothing would be compared; let its devices be "
            f"an option, and give it here as in --devices={RANKS}, or let torchrun's variable "
            "LOCAL_WORLD_SIZE set them",
            Exit.MISTAKE,
        )

    def _environment(self, folder: Path, ranks: int) -> dict[str, str]:
        """Return the variables of a run; each rank has as many threads on any number of ranks."""
        paths = [str(self._imported), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        values = {"OMP_NUM_THREADS": "1", **os.environ, FOLDER: str(folder)}
        values[ASKED] = str(ranks)
        values["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        if self._steps is not None:
            values[STEPS] = str(self._steps)
        return values


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a command: a launcher ends its ranks, else all of them are killed.

    Ranks that wait for each other don't end, and torchrun gives each a group of its own.
    """
    started = [process.pid]
    if process.poll() is None:
        started += _started_by(process.pid)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
    for group in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    process.wait()


def _started_by(parent: int) -> list[int]:
    """Return the processes that one has started, and those that these have."""
    command = ["ps", "-eo", "pid=,ppid="]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pairs = [[int(word) for word in line.split()] for line in listing.splitlines()]
    found = [parent]
    for process in found:  # which grows
        found += [child for child, its_parent in pairs if its_parent == process]
    return found[1:]


def _of_failed(folder: Path) -> Path | None:
    """Return what the rank printed that failed first, if torchrun kept it."""
    printed = [
        path
        for path in sorted(folder.rglob("stderr.log"), key=lambda path: path.stat().st_mtime)
        if path.stat().st_size
    ]
    failed = [path for path in printed if "Traceback" in path.read_text("utf-8", "replace")]
    return next(iter([*failed, *printed]), None)


def results_in(folder: Path) -> Results:
    """Return what a run has left in its folder."""
    import torch

    content = torch.load(folder / OUTCOME, map_location="cpu", weights_only=True)
    return Results([content["row"]], content["state"], LOG)
