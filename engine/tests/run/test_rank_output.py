import logging
import os
import sys
import warnings

import pytest

from lockstep.ranks.ranks import Ranks
from lockstep.run.directory import RunDirectory
from lockstep.run.rank_output import drop_rank_log, routed_output

logger = logging.getLogger("lockstep_gpt.training.anything")


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path)


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Restore what a rank changes permanently in its process."""
    root, streams = logging.getLogger(), [os.dup(1), os.dup(2)]
    before, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in ("lightning", "torch", "fsspec")}
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    yield
    logging.captureWarnings(False)
    root.handlers = before
    root.setLevel(level)
    for name, was in levels.items():
        logging.getLogger(name).setLevel(was)
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)


def test_rank_zero_writes_the_same_to_screen_and_log(run, capsys):
    with routed_output(run, Ranks()) as terminal:
        logger.info("a line of %d words", 5)
        assert terminal is sys.stderr
    assert run.log.read_text() == capsys.readouterr().out == "a line of 5 words\n"


@pytest.mark.parametrize(
    ("verbosity", "heard"),
    [("quiet", "warning"), ("normal", "info warning"), ("debug", "debug info warning")],
)
def test_verbosity_selects_the_messages_shown(run, capsys, verbosity, heard):
    with routed_output(run, Ranks(), verbosity):
        for level in ("debug", "info", "warning"):
            getattr(logger, level)(level)
    assert capsys.readouterr().out.split() == heard.split()


@pytest.mark.filterwarnings("default")
def test_warnings_of_libraries_are_one_line_and_known_noise_is_dropped(run, capsys):
    with routed_output(run, Ranks()):
        warnings.warn("mind the step", stacklevel=1)
        warnings.warn(
            "The 'val_dataloader' does not have many workers which may be a bottleneck.",
            stacklevel=1,
        )
        logging.getLogger("lightning.pytorch").info("GPU available: False")
    assert capsys.readouterr().out == "warning: mind the step\n"


def test_logging_is_as_before_when_a_rank_has_ended(run):
    before = logging.getLogger().handlers[:]
    with routed_output(run, Ranks()):
        assert logging.getLogger().handlers != before
    assert logging.getLogger().handlers == before


def test_other_ranks_write_to_their_own_files(run, capfd):
    ranks = Ranks(rank=2, world_size=4)
    with routed_output(run, ranks) as terminal:
        logger.info("logged")
        os.write(1, b"printed by C++\n")
        os.write(2, b"and its errors\n")
        with terminal:
            print("the failure", file=terminal)
    log = run.rank_log(2).read_text()
    assert "printed by C++\nand its errors\n" in log
    assert not run.log.exists()
    out, err = capfd.readouterr()
    assert "printed" not in out + err
    assert err == "the failure\n"


def test_files_of_successful_ranks_and_then_their_folder_are_removed(run):
    for rank in (1, 2):
        run.rank_log(rank).parent.mkdir(exist_ok=True)
        run.rank_log(rank).touch()
    drop_rank_log(run, Ranks(rank=1))
    assert [path.name for path in run.rank_log(2).parent.iterdir()] == ["2.log"]
    drop_rank_log(run, Ranks(rank=2))
    assert not run.rank_log(2).parent.exists()
