"""The examples of the page's exit statuses end with these statuses."""

import re
import shlex
import signal
import socket
from pathlib import Path

import pytest
from lockstep_gpt import PROJECT

PROGRAM = PROJECT.program

PAGE = Path(__file__).parents[3] / "docs/troubleshooting.md"
ROW = re.compile(rf"^\| ([\d+ n]+) \| .* \| `([^`]*\b{PROGRAM} train [^`]+)`.* \|$", re.MULTILINE)
EXAMPLES = dict(ROW.findall(PAGE.read_text("utf-8")))


def words_of(status):
    """Return the words of an example, after the program's name."""
    words = shlex.split(EXAMPLES[status])
    return words[words.index(PROGRAM) + 1 :]


def quick(command, words):
    """Return words with the data of all tests."""
    return [*words, f"data.root={command.data_root}", "logger=none", "callbacks.sample.length=9"]


def test_each_kind_of_status_has_an_example():
    assert [*EXAMPLES] == ["0", "1", "2", "128 + n", "75"]


def test_status_0_is_that_of_the_first_run(commands_of_fixtures):
    assert " ".join(words_of("0")) in commands_of_fixtures  # which check it


@pytest.mark.parametrize("status", [1, 2])
def test_a_failure_is_1_and_a_mistake_is_2(command, status):
    command(*quick(command, words_of(str(status))), "launch.inline=true", status=status)


@pytest.mark.slow
def test_a_signal_is_added_to_128(command, wait_for_checkpoint):
    process = command.start(*quick(command, words_of("128 + n")), "launch.inline=true")
    wait_for_checkpoint(command.folder / "runs/stopped")
    process.terminate()  # as `timeout` does
    process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_rank_of_a_launcher_that_lost_others_ends_with_75_and_the_way_on(
    command, wait_for_checkpoint
):
    before, _, _ = EXAMPLES["75"].partition(f" {PROGRAM} ")
    environment = dict(word.split("=") for word in before.split())
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment["MASTER_PORT"] = str(server.getsockname()[1])
    words = quick(command, words_of("75"))
    ranks = [command.start(*words, **{**environment, "RANK": rank}) for rank in ("0", "1")]
    wait_for_checkpoint(command.folder / "runs/lost")
    ranks[1].kill()
    _, err = ranks[0].communicate(timeout=240)
    ranks[1].communicate(timeout=240)
    assert ranks[0].returncode == 75
    line = err.splitlines()[-1]
    assert re.match(r"rank 0 lost other ranks; .*; step \d+ is saved; to continue: ", line)
    assert line.endswith(" train run_dir=runs/lost resume=auto")
