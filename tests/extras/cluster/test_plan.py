import json
import sys
import time

import pytest

from lockstep_gpt import cli
from lockstep_gpt.config import PROGRAM
from lockstep_gpt.extras.cluster.hardware import HARDWARE
from lockstep_gpt.extras.cluster.plan import WORLD_SIZES
from lockstep_gpt.extras.cluster.prediction import predict

SMALL = ["plan", "experiment=smoke", "--devices", "1,2,8"]


@pytest.fixture
def screen(capsys):
    """Run the command in this process; return its exit status, output and errors."""

    def run(*words):
        status = cli.main(list(words))
        return (status, *capsys.readouterr())

    return run


def test_gpt2_xl_over_eleven_numbers_of_devices_takes_less_than_a_second(composed):
    config = composed("model=gpt2_xl")
    times = []
    for _ in range(2):  # the first also imports what torch puts off
        started = time.process_time()
        plan = predict(config, HARDWARE["h100"], WORLD_SIZES)
        times.append(time.process_time() - started)
    assert [row.batch.world_size for row in plan.rows] == [2**power for power in range(11)]
    assert min(times) < 1


def test_the_table_has_a_line_for_each_number_of_devices(screen):
    status, out, err = screen(*SMALL, "--price", "1.5")
    steps = out.split("one optimizer step, ms\n")[1].splitlines()
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in steps] == ["devices", "1", "2", "8"]
    assert steps[0].split()[-1] == "cost"
    assert len({len(line) for line in steps}) == 1


def test_the_output_says_what_is_assumed_and_where_figures_are_from(screen):
    _, out, _ = screen(*SMALL, "--hardware", "a100-80", "--utilisation", "0.55")
    facts = dict(line.split(maxsplit=1) for line in out.split("\n\n")[0].splitlines())
    assert facts["assumed"].startswith("0.55 of the peak")
    assert facts["source"] == HARDWARE["a100-80"].source
    assert "the Chinchilla point, 20 per parameter" in facts["tokens"]


def test_json_and_table_tell_the_same(screen):
    plan = json.loads(screen(*SMALL, "--json")[1])
    _, out, _ = screen(*SMALL)
    for row in plan["rows"]:
        assert f"{row['tokens_per_second']:,.0f}" in out
    assert f"{plan['parameters']:,} parameters" in out


def test_flags_change_the_hardware(screen):
    words = ("--intra", "pcie3", "--inter", "1.25", "--adapters", "2", "--per-node", "4")
    hardware = json.loads(screen(*SMALL, *words, "--json")[1])["hardware"]
    assert (hardware["intra"]["name"], hardware["inter"]["bandwidth"]) == ("pcie3", 1.25e9)
    assert (hardware["adapters"], hardware["devices_per_node"]) == (2, 4)


def test_the_chart_is_a_picture_of_all_numbers_of_devices(screen, tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    status, _, err = screen("plan", "experiment=smoke", "--chart", str(tmp_path / "scaling.png"))
    assert (status, err) == (0, "")
    height, width, _ = imread(tmp_path / "scaling.png").shape
    assert width > height > 400


def test_a_chart_without_matplotlib_says_how_to_get_it(screen, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, err = screen(*SMALL, "--chart", str(tmp_path / "scaling.png"))
    assert status == 2
    assert f'pip install "{PROGRAM}[cluster]"' in err


@pytest.mark.parametrize(
    "wrong",
    [
        "--hardware v100",
        "--intra copper",
        "--devices 1,0",
        "--devices many",
        "--scaling up",
        "--tokens -1",
        "--price nan",
        "--utilisation 1.5",
        "--chart",
        "model.n_layers=3",
    ],
)
def test_a_mistake_is_one_line(screen, wrong):
    status, out, err = screen("plan", "experiment=smoke", *wrong.split())
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"{PROGRAM} plan: ")


@pytest.mark.parametrize("name", ["plan", "doctor"])
def test_help_is_one_screen_and_names_every_flag(name, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 0
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
