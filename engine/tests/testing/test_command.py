"""The `check` command runs the same comparison as the function."""

import re

import pytest

from lockstep import commands as cli
from lockstep.testing import command as check_command

SHORT = ["val_tokens=512", "callbacks=[]", "model.n_layer=1"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_one_two_and_killed_ranks_give_one_hash(capsys, command, monkeypatch):
    monkeypatch.chdir(command.folder)
    words = ["--ranks", "2,1", "--steps", "5", "--kill-after", "2"]
    status = cli.main(["check", *words, f"data.root={command.data_root}", *SHORT])
    printed = capsys.readouterr()
    assert status == 0, printed
    *runs, equal = printed.out.splitlines()
    matches = [re.fullmatch(r"  (.+?) +([0-9a-f]{12}) +\d+ s", line) for line in runs]
    names = ["1 rank", "1 rank, killed", "2 ranks", "2 ranks, killed"]
    assert [match[1] for match in matches] == names
    assert len({match[2] for match in matches}) == 1
    assert equal.startswith("equal bit for bit: weights, states of optimizers, 5 rows")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_difference_is_shown_and_ends_with_status_one(capsys, command, monkeypatch):
    monkeypatch.chdir(command.folder)
    words = ["--ranks", "1,2", "--steps", "2", "--tolerance", "1e-14", "precision=32-true"]
    assert cli.main(["check", *words, f"data.root={command.data_root}", *SHORT]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^2 ranks and 1 rank differ: ", out, re.MULTILINE)
    assert re.search(r"^cause: (sums in another order|rounding)", out, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "1,3"], "equal bits on 1, 2, or 4 devices, not on 3; use one of these"),
        (["batch.exact_micro_size=null"], "tolerance=None needs equal bits"),
        (["optim.lr=-1"], "lr=-1 must be above 0"),
    ],
)
@pytest.mark.usefixtures("quick_ranks")
def test_what_cannot_be_equal_is_one_line_of_a_mistake(
    words, message, capsys, command, monkeypatch
):
    monkeypatch.chdir(command.folder)
    short = ["--steps", "1", f"data.root={command.data_root}", *SHORT]
    assert cli.main(["check", *short, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lockstep-gpt check: ")
    assert message in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--ranks", "2"],
            "ranks=(2,) compares nothing; give several, as in (1, 2), or kill_after",
        ),
        (["trainer.devices=2"], "trainer.devices=2 is set by the check; use --ranks"),
        (["--kil-after"], "--kil-after is not a flag of check; did you mean --kill-after?"),
        (["--multirun"], "--multirun starts a sweep; a check trains one experiment"),
        (["--tolerance", "0"], "argument --tolerance: 0 must be a number above 0"),
    ],
)
def test_a_wrong_flag_is_rejected_first(words, message, capsys):
    assert cli.main(["check", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith(f"lockstep-gpt check: {message}")


def test_help_shows_the_flags(capsys):
    with pytest.raises(SystemExit):
        cli.main(["check", "--help"])
    defaults = " By default: experiment=smoke batch.exact_micro_size=2."
    screen = check_command.HELP.format(defaults=defaults).replace("PROGRAM", "lockstep-gpt")
    assert capsys.readouterr().out.strip() == screen
