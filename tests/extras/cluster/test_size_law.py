"""The command `size_law`, which repeats the fit: real runs, its table, its files."""

import json

import pytest

from lockstep_gpt.extras.cluster.law import Law, expected
from lockstep_gpt.launch import compose


@pytest.fixture
def size_law(command, python_of_forks):
    """Run the command in the test's folder; return its exit status and output."""

    def run(*words):
        settings = [f"data.root={command.data_root}", "data.val_tokens=1024"]
        line = ["-m", "lockstep_gpt", "size_law", *words, *settings]
        return command.run_words([python_of_forks, *line])

    return run


@pytest.mark.slow
def test_it_fits_predicts_and_prints_the_result(size_law, command):
    status, out, err = size_law("--sizes", "10k,16k,28k")
    assert status in (0, 1), err
    fit = json.loads((command.folder / "size_law.json").read_text())
    assert [run["size"] for run in fit["runs"]] == ["10k", "16k", "28k"]
    assert all(run["tokens"] >= 2 * run["weights"] for run in fit["runs"])
    assert (status == 0) == fit["is_valid"] == ("no valid fit" not in err)
    law = Law(fit["floor"], fit["factor"], fit["exponent"])
    for run in fit["runs"]:
        assert f"{run['val_loss']:7.4f} {law.loss(run['weights']):7.4f}" in out
    status, out, err = size_law("--check", "40k")
    assert f"40k is expected to end at {law.loss(12 * 56**2):.4f}\n" in out
    assert out.splitlines()[-1].startswith("it ends at ")
    (checked,) = json.loads((command.folder / "size_law.json").read_text())["checked"]
    assert checked["expected"] == law.loss(checked["weights"])
    assert "40k, " in (command.folder / "size_law.svg").read_text()
    configs = []
    words = ["model=auto", "size.weights=16k", f"size.law={command.folder}/size_law.json"]
    compose.run(words, lambda composed: configs.append(compose.resolve_config(composed)[1]))
    assert (expected(configs[0]) is None) == (not fit["is_valid"])


def test_a_run_that_fails_ends_it(size_law, command):
    status, _, err = size_law("optim.lrr=1")
    assert (status, err.splitlines()[-1]) == (
        1,
        "lockstep-gpt size_law: training failed; its own message is above",
    )
    assert not (command.folder / "size_law.json").exists()


def test_a_check_needs_a_fit(size_law):
    status, _, err = size_law("--check", "2M")
    line = "size_law.json does not exist; write it by this command without --check"
    assert (status, err) == (2, f"lockstep-gpt size_law: {line}\n")
