import re
import shutil
import sys
import time
from dataclasses import replace
from html import unescape

import pytest
import yaml

from lockstep import commands as cli
from lockstep.optional import install_command
from lockstep.pages.run_report import outcome, report
from lockstep.pages.runs import read_run
from lockstep.whole_files import write_output

pytest.importorskip("matplotlib")
NASTY = "</pre><img src=x onerror=alert(1)><script>alert(1)</script>"


@pytest.fixture
def run(recorded):
    return read_run(recorded[0])


@pytest.fixture
def other(two):
    """A run that differs from `run` only in callbacks."""
    return read_run(two[0].folder / "runs/two")


def rows(text, section):
    """Return a table as key -> cells, and the keys of the highlighted rows."""
    table = text.split(f"<h2>{section}</h2>")[1].split("</table>")[0]
    found, differing = {}, []
    for kind, key, cells in re.findall(r"<tr(.*?)><th>(.*?)</th>(<td>.*)</tr>", table):
        found[unescape(key)] = [unescape(cell) for cell in re.findall("<td>(.*?)</td>", cells)]
        if kind:
            differing.append(key)
    return found, differing


def lines(text):
    """Return the number of corners of each line of the curves, without those of the axes."""
    paths = re.findall(r'<path d="([^"]+)" clip-path[^>]+style="[^"]*stroke: #1f77b4', text)
    return [len(re.findall("[ML] ", path)) for path in paths]


@pytest.mark.slow
def test_every_column_of_the_metrics_is_a_curve_through_its_points(run):
    text = report([run])
    titles = ["train/loss (pale), val/loss", *(name for name in run.curves if "loss" not in name)]
    assert all(f">{title}</text>" in text for title in titles)
    assert sorted(lines(text)) == sorted(map(len, run.curves.values()))


@pytest.mark.slow
def test_curves_are_over_steps_or_tokens(run):
    over_steps, over_tokens = (report([run], over) for over in ("steps", "tokens"))
    assert (">steps</text>" in over_steps, ">tokens</text>" in over_steps) == (True, False)
    assert (">steps</text>" in over_tokens, ">tokens</text>" in over_tokens) == (False, True)


def test_a_value_that_is_not_finite_leaves_a_gap(run):
    points = [(float(step), 0.0, float(step != 3)) for step in range(1, 6)]
    points[2] = (3.0, 0.0, float("nan"))
    text = report([replace(run, curves={"train/loss": points})])
    (path,) = re.findall(r'<path d="([^"]+)" clip-path[^>]+stroke: #1f77b4', text)
    assert (path.count("M "), path.count("L ")) == (2, 2)


@pytest.mark.slow
def test_outcome_receipt_sample_and_environment_are_those_of_the_run(run):
    text = report([run])
    found, _ = rows(text, "Outcome")
    assert found == {name: [value] for name, value in outcome(run).items()}
    assert found.items() >= {"status": ["done"], "steps": ["20"], "tokens": ["5,120"]}.items()
    step, _, loss = min(run.curves["val/loss"], key=lambda point: point[2])
    assert found["lowest validation loss"] == [f"{loss:.4f} at step {step:.0f}"]
    assert rows(text, "Receipt")[0] == {name: [line] for name, line in run.receipts[0].items()}
    assert rows(text, "Environment")[0]["torch"] == [run.environment["torch"]]
    assert unescape(text.split("<pre>")[1].split("</pre>")[0]) == run.samples[-1][1]


@pytest.mark.slow
def test_a_comparison_marks_the_rows_that_differ(run, other):
    text = report([other, run])
    assert "<h1>two, recorded</h1>" in text
    receipt, differing = rows(text, "Receipt")
    assert differing == ["run"]
    assert receipt["batch"][0] == receipt["batch"][1]
    assert rows(text, "Outcome")[0]["steps"] == ["20", "20"]
    assert text.count(">recorded</text>") == text.count(">two</text>") > 4  # in each panel


def test_a_run_without_steps_still_has_a_report(recorded, tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    (new / "config.yaml").write_bytes((recorded[0] / "config.yaml").read_bytes())
    text = report([read_run(new)])
    assert rows(text, "Outcome")[0]["status"][0].startswith("still running")
    assert "<svg" not in text
    assert "<pre>" not in text


def test_markup_in_samples_and_names_is_text(run):
    curves = {NASTY: run.curves["train/loss"]}
    text = report([replace(run, name=NASTY, samples=[(1, NASTY)], curves=curves)] * 2)
    assert "<img" not in text
    assert "<script" not in text


@pytest.mark.slow
def test_equal_runs_have_equal_reports_that_name_no_address_elsewhere(run):
    text = report([run])
    assert text == report([run])
    curves, _, rest = text.partition("<svg")[2].partition("</svg>")
    loaded = re.compile(r"@import|\bsrc=|url\((?!#)|href=\"(?!#)")
    assert not loaded.search(text.partition("<svg")[0] + curves + rest)


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 1400])
def test_a_browser_shows_it_without_a_network_and_without_scrolling_sideways(
    recorded, tmp_path, show, width
):
    write_output(tmp_path / "report.html", report([read_run(recorded[0])]))
    view = show(tmp_path / "report.html", width=width)
    assert view.locator("svg").count() == 1
    assert view.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_a_report_is_in_its_run_or_in_the_folder_of_several(two, tmp_path, capsys):
    runs = [
        shutil.copytree(two[0].folder / "runs" / name, tmp_path / name) for name in ("first", "two")
    ]
    assert cli.main(["report", str(runs[0])]) == 0
    assert cli.main(["report", *map(str, runs), "--over", "tokens"]) == 0
    assert "<h1>first</h1>" in (runs[0] / "report.html").read_text()
    assert "<h1>first, two</h1>" in (runs[0].parent / "report.html").read_text()
    assert capsys.readouterr().out.count("open it in any browser") == 2


def test_without_matplotlib_the_install_command_is_named(recorded, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["report", str(recorded[0])]) == 2
    error = capsys.readouterr().err
    assert "lockstep-gpt report needs matplotlib" in error
    assert error.endswith(f"run: {install_command('report')}\n")


@pytest.mark.slow
@pytest.mark.usefixtures("full_disk")
def test_a_report_on_a_full_disk_keeps_the_old_one(finished, tmp_path, capsys):
    path = tmp_path / "report.html"
    path.write_text("old")
    words = ["report", str(finished[0].folder / "runs/first"), "--output", str(path)]
    assert cli.main(words) == 2
    assert f"{path} cannot be written (File too large); raise the limit" in capsys.readouterr().err
    assert path.read_text() == "old"


@pytest.mark.slow
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


@pytest.mark.slow
def test_no_secret_of_the_configuration_is_in_it(finished):
    run = finished[0].folder / "runs/first"
    values = yaml.safe_load((run / "config.yaml").read_text())
    assert "callbacks" in values
    assert "_target_" not in report([read_run(run)])


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


@pytest.mark.slow
def test_a_report_of_100_000_steps_is_small_and_quick(long_run):
    started = time.process_time()
    text = report([read_run(long_run)])
    assert time.process_time() - started < 10
    assert len(text.encode()) < 1_000_000
