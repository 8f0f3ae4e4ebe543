"""The ladder's README: every command in it runs, and prints the output shown."""

import re
import shlex
import socket
from pathlib import Path

import pytest
import torch
from lockstep_gpt import PROJECT

TEXT = (Path(__file__).parents[4] / "lab/ladder/README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```\n(\$ .*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
PARTS = [part for block in BLOCKS for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
SHOWN = dict(part.split("\n", 1) for part in PARTS)  # command -> output; no output is an empty text
BY_HAND = [line for line in SHOWN if line.startswith("RANK=")]
RUN = [line for line in SHOWN if line.startswith("python ")]
BY_COMPARE = [line for line in SHOWN if line not in (*RUN, *BY_HAND)]
SAME_EVERYWHERE = ("mini_allreduce", "collectives")


def outline(text):
    """Return the text with `#` for each number: losses depend on the machine's libraries."""
    return re.sub(r"\d[\d,.]*(e[+-]\d+)?", "#", " ".join(text.split()))


def known(text):
    """Return the text without the pitfall that torch 2.14 mends, if it does so here."""
    if torch.__version__ < "2.14":
        return text
    return re.sub(r"^address under a launcher:.*\n.*\n.*\n", "", text, flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("line", RUN)
def test_a_command_prints_the_output_quoted_below_it(line, shown):
    out = shown(line)
    if any(name in line for name in SAME_EVERYWHERE):
        assert out.split() == SHOWN[line].split()
    elif SHOWN[line]:
        assert outline(known(out)) == outline(known(SHOWN[line]))


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("line", BY_COMPARE)
def test_a_launcher_s_command_is_one_that_the_comparison_runs(line, ladder):
    from compare import rungs

    names = ("torchrun", "accelerate", "launch", PROJECT.program, "trainer=cpu")
    words = [word for word in shlex.split(line) if word not in names]
    rung = next((Path(word).stem for word in words if word.endswith(".py")), PROJECT.program)
    started = " ".join(dict(rungs(2))[rung]).replace(str(ladder), "lab/ladder")
    assert set(words) <= set(started.replace("--num_processes=", "--num_processes ").split())


def test_every_script_is_spoken_of(ladder):
    assert {path.name for path in ladder.glob("*.py") if path.name not in TEXT} == set()


def test_ranks_of_two_terminals_meet_at_their_address(start, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lines = [line.replace(":29511", f":{port}") for line in BY_HAND]
    ranks = [start(f"{line} max_steps=6", tmp_path) for line in lines]
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert [out.count("val_loss") for out, _ in outputs] == [1, 0]  # rank 0 alone prints
