import json
import re

import pytest

from lockstep_gpt.extras.pages.page import render_page
from lockstep_gpt.extras.pages.run_report import report_page
from lockstep_gpt.extras.pages.runs import read_run
from lockstep_gpt.whole_files import write_output


@pytest.fixture
def path(recorded, tmp_path):
    write_output(tmp_path / "report.html", report_page([recorded[0]]))
    return tmp_path / "report.html"


@pytest.fixture
def view(path, show):
    return show(path)


@pytest.fixture
def both(recorded, two, tmp_path, show):
    """The report of two runs that differ only in callbacks."""
    runs = [two[0].folder / "runs/two", recorded[0]]
    write_output(tmp_path / "both.html", report_page(runs))
    return show(tmp_path / "both.html")


def cells(view, section):
    rows = view.locator(f"#{section} tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


def outcome(view):
    pairs = view.locator("#outcome dl div").all()
    return {pair.locator("dt").inner_text(): pair.locator("dd").inner_text() for pair in pairs}


def test_every_column_of_the_metrics_is_a_curve_with_its_last_value(view, recorded):
    curves = read_run(recorded[0])["curves"]
    labels = view.locator("#curves figcaption b").all_inner_texts()
    curves.pop("optim/skipped")  # there are none
    assert sorted(labels) == sorted(curves)
    assert labels[:2] == ["train/loss", "val/loss"]
    last = curves["train/loss"][-1][2]
    assert view.locator("#curves figcaption span").first.inner_text() == f"{last:.4f} at 20"


def test_a_curve_is_drawn_through_all_its_points(view, recorded):
    curves = read_run(recorded[0])["curves"]
    for name in ("train/loss", "sync/noise_scale"):
        figure = view.locator("figure", has=view.get_by_text(name, exact=True))
        line = figure.locator("path.series").get_attribute("d")
        assert len(re.findall(r"[ML]", line)) == len(curves[name])


def test_outcome_receipt_and_commands_are_those_of_the_run(view, recorded):
    run = read_run(recorded[0])
    labels = outcome(view)
    assert labels.items() >= {"status": "done", "steps": "20", "tokens": "5,120"}.items()
    seconds = run["summary"]["wall_seconds"]
    assert float(labels["wall seconds of the last start"]) == pytest.approx(seconds, abs=0.051)
    assert cells(view, "receipt") == {name: [line] for name, line in run["receipt"].items()}
    assert cells(view, "commands") == {name: [line] for name, line in run["commands"].items()}
    sample = run["samples"][0]["text"].split("\n")[0]
    assert sample.startswith("class to read")
    assert view.locator("#samples pre").first.inner_text().startswith(sample[:13])


def test_curves_can_be_read_by_keys_and_by_pointer(view, recorded):
    rows = read_run(recorded[0])["curves"]["train/loss"]
    figure = view.locator("#curves figure").first
    caption = figure.locator("figcaption span")
    figure.focus()
    figure.press("ArrowLeft")
    assert caption.inner_text() == f"{rows[-2][2]:.4f} at {rows[-2][0]:.0f}"
    figure.locator("svg").hover(position={"x": 53, "y": 60})
    assert caption.inner_text() == f"{rows[0][2]:.4f} at {rows[0][0]:.0f}"
    view.locator("h1").hover()
    assert caption.inner_text().endswith("at 20")


def test_curves_go_over_tokens_and_on_a_logarithmic_scale(view):
    before = view.locator("#curves path.series").first.get_attribute("d")
    view.locator("#axis").select_option("tokens")
    caption = view.locator("#curves figcaption span").first.inner_text()
    assert caption.endswith("at 5,120")
    view.locator("#log").check()
    assert view.locator("#curves path.series").first.get_attribute("d") != before


def test_a_comparison_marks_the_differing_settings(both):
    assert both.locator("h1").inner_text() == "2 runs"
    assert both.locator("#legend li").all_inner_texts() == ["two", "recorded"]
    assert both.locator("#curves figure").first.locator("path.series").count() == 2
    differing = both.locator("#receipt tr.differs th").all_inner_texts()
    assert differing == ["run"]
    assert cells(both, "outcome")["steps"] == ["20", "20"]
    receipt = cells(both, "receipt")
    assert receipt["batch"][0] == receipt["batch"][1]


def test_a_run_without_steps_still_has_a_page(recorded, tmp_path, show):
    new = tmp_path / "new"
    new.mkdir()
    (new / "config.yaml").write_bytes((recorded[0] / "config.yaml").read_bytes())
    write_output(tmp_path / "new.html", report_page([new]))
    view = show(tmp_path / "new.html")
    assert outcome(view)["status"].startswith("still running")
    assert view.locator("#samples-section").is_hidden()


def test_values_that_are_not_finite_leave_a_gap(recorded, tmp_path, show):
    run = json.loads(json.dumps(read_run(recorded[0])))
    run["curves"]["train/loss"][1][2] = None
    write_output(tmp_path / "gap.html", render_page("report", {"runs": [run]}))
    line = show(tmp_path / "gap.html").locator("#curves path.series").first.get_attribute("d")
    assert line.count("M") == 2


def test_markup_in_samples_and_names_is_text(recorded, tmp_path, show):
    nasty = "</script><img src=x onerror=alert(1)>"
    run = {**read_run(recorded[0]), "name": nasty, "samples": [{"step": 1, "text": nasty}]}
    write_output(tmp_path / "page.html", render_page("report", {"runs": [run]}))
    view = show(tmp_path / "page.html")
    assert view.locator("h1").inner_text() == nasty
    assert view.locator("img").count() == 0


@pytest.mark.parametrize("width", [320, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_width_makes_the_page_scroll_sideways(path, show, width, scheme):
    view = show(path, width=width, color_scheme=scheme)
    assert view.evaluate("document.documentElement.scrollWidth") <= width
