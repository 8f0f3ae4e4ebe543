import json
import re
import sys
import time

import pytest
import torch
import yaml

from lockstep_gpt import cli
from lockstep_gpt.extras.pages import at_end
from lockstep_gpt.extras.pages.run_report import report_page
from lockstep_gpt.extras.pages.runs import read_run

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def data(path):
    return json.loads(DATA.findall(path.read_text(encoding="utf-8"))[0])["runs"]


def weights(run, step):
    path = run / f"checkpoints/step={step:06d}.ckpt"
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def reported(finished):
    """The README's first run, which writes a report."""
    return finished[0].folder / "runs/first"


def test_a_run_writes_its_report_and_prints_the_path(reported):
    (run,) = data(reported / "report.html")
    assert run["status"] == "done"
    assert run["curves"] == read_run(reported)["curves"]
    known = read_run(reported)["summary"]  # this is written only after the report
    assert run["summary"]["tokens_per_second"] == known["tokens_per_second"]
    assert run["summary"].items() <= known.items()
    assert "report  runs/first/report.html" in (reported / "train.log").read_text()


def test_the_report_names_devices_and_versions(reported):
    noted = json.loads((reported / "environment.json").read_text())
    assert noted["torch"] == torch.__version__
    assert noted["python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_stopped_or_failed_run_writes_a_report_too(command):
    words = ["run_dir=run", "optim.lr=1e30", "optim.clip_norm=null"]
    command.train(*words, status=1)
    (run,) = data(command.folder / "run/report.html")
    assert run["status"].startswith("failed: step")


def test_a_run_that_wants_no_report_writes_none(command):
    command.train("pages.report=false", "run_dir=run")
    assert command.summary("run")["status"] == "done"
    written = {path.name for path in (command.folder / "run").iterdir()}
    assert not written & {"report.html", "environment.json"}


def test_a_run_without_callbacks_of_its_own_writes_a_report(command):
    command.train("~callbacks", "run_dir=run")
    (run,) = data(command.folder / "run/report.html")
    assert run["status"] == "done"


TALKATIVE = """
import lightning
class Talkative(lightning.Callback):
    def on_train_batch_end(self, trainer, *_):
        for logger in trainer.loggers:
            logger.log_metrics({"my/word": "fine", "my/flag": True}, trainer.global_step)
"""


def test_metrics_that_are_not_numbers_are_left_out(command):
    (command.folder / "talkative.py").write_text(TALKATIVE)
    words = ("run_dir=run", "+callbacks.talkative._target_=talkative.Talkative")
    command.train(*words, PYTHONPATH=str(command.folder))
    (run,) = data(command.folder / "run/report.html")
    assert run["status"] == "done"
    assert "train/loss" in run["curves"]
    assert not {"my/word", "my/flag"} & set(run["curves"])


def test_a_failing_report_does_not_change_how_the_run_ends(command, monkeypatch):
    monkeypatch.setattr(at_end, "report_page", lambda *_, **__: {}["no such column"])
    command.train("run_dir=run")
    assert command.summary("run")["status"] == "done"
    assert "no report: KeyError: 'no such column'" in (command.folder / "run/train.log").read_text()


def test_a_report_is_in_its_run_or_in_the_folder_of_several(two, capsys):
    runs = [two[0].folder / "runs" / name for name in ("first", "two")]
    assert cli.main(["report", str(runs[0])]) == 0
    assert cli.main(["report", *map(str, runs)]) == 0
    assert [run["name"] for run in data(runs[0] / "report.html")] == ["first"]
    assert [run["name"] for run in data(runs[0].parent / "report.html")] == ["first", "two"]
    assert capsys.readouterr().out.count("open it in any browser") == 2


@pytest.mark.usefixtures("full_disk")
def test_a_report_on_a_full_disk_keeps_the_old_one(finished, tmp_path, capsys):
    path = tmp_path / "report.html"
    path.write_text("old")
    words = ["report", str(finished[0].folder / "runs/first"), "--output", str(path)]
    assert cli.main(words) == 2
    assert f"{path} cannot be written (File too large); name" in capsys.readouterr().err
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere is not a run directory"),
        (["first", "."], ". is not a run directory"),
        (["first", "--output", "no/such/folder.html"], "cannot be written (No such file"),
    ],
)
def test_runs_that_cannot_be_reported_fail_in_one_line(
    words, message, finished, monkeypatch, capsys
):
    monkeypatch.chdir(finished[0].folder / "runs")
    assert cli.main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def typed(command, line, python):
    """Run a command line of the report in a shell."""
    module = f"{python} -m lockstep_gpt "
    words = line.replace("lockstep-gpt ", module)
    status, _, error = command.run_words(["sh", "-c", words])
    assert status == 0, error


@pytest.mark.slow
def test_its_commands_repeat_the_run_to_the_bit_and_train_on(reported, finished, python_of_forks):
    command, again = finished[0], finished[0].folder / "runs/first-again"
    typed(command, read_run(reported)["commands"]["repeat"], python_of_forks)
    before, after = weights(reported, 20), weights(again, 20)
    assert all(torch.equal(before[name], after[name]) for name in before)
    typed(command, read_run(again)["commands"]["train longer"], python_of_forks)
    run = read_run(again)
    assert run["summary"]["step"] == 40
    assert run["starts"] == 2
    assert any("max_steps" in change for change in run["changes"])


def test_it_names_the_page_on_comparisons_if_the_project_has_it(reported):
    questions = [name for name in read_run(reported)["commands"] if name.startswith("is a change")]
    assert bool(questions) == ("compare" in cli.COMMANDS)


def test_no_secret_of_the_configuration_is_in_it(finished):
    run = finished[0].folder / "runs/first"
    values = yaml.safe_load((run / "config.yaml").read_text())
    assert "callbacks" in values
    assert "config" not in read_run(run)


@pytest.fixture(scope="module")
def long_run(finished, tmp_path_factory):
    """A run directory with 100,000 logged steps of ten columns."""
    run = tmp_path_factory.mktemp("long")
    (run / "config.yaml").write_bytes((finished[0].folder / "runs/first/config.yaml").read_bytes())
    names = [f"group/column_{index}" for index in range(8)]
    lines = [",".join(["trainer/step", "trainer/tokens", *names])]
    values = ",".join(f"{1 / 7 + index!r}" for index in range(8))
    lines += [f"{step},{step * 768},{values}" for step in range(1, 100_001)]
    (run / "metrics.csv").write_text("\n".join(lines) + "\n")
    return run


def test_a_report_of_100_000_steps_is_small_and_quick(long_run):
    started = time.process_time()
    text = report_page([long_run])
    assert time.process_time() - started < 2
    assert len(text.encode()) < 1_000_000
