import json
import re
import shutil

import pytest

from lockstep import commands as cli
from lockstep.pages.panel import panel_page, render

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
NASTY = ["</script><script>alert(1)</script>", "<!--", "]]>", "\u2028", "\\", '"', "{}", "größer"]


def test_the_command_writes_the_page_next_to_the_recordings(recorded, recordings, capsys):
    assert cli.main(["panel", str(recorded[0])]) == 0
    path = recorded[0] / "panel.html"
    assert capsys.readouterr().out.startswith(f"{path}: ")
    data = json.loads(DATA.findall(path.read_text(encoding="utf-8"))[0])
    assert data == {"name": "recorded", "recordings": recordings}


def test_the_page_is_written_to_output(recorded, tmp_path):
    assert cli.main(["panel", str(recorded[0]), "--output", str(tmp_path / "see.html")]) == 0
    assert (tmp_path / "see.html").read_text(encoding="utf-8") == panel_page(recorded[0])


def test_the_page_without_data_is_small(recorded):
    text = panel_page(recorded[0])
    assert len(text.encode()) - len(DATA.findall(text)[0].encode()) < 300_000


def test_text_of_samples_cannot_end_the_data(recorded):
    text = render({"name": NASTY, "recordings": []})
    assert json.loads(DATA.findall(text)[0])["name"] == NASTY
    assert text.count("</script>") == panel_page(recorded[0]).count("</script>") == 2
    assert "<!--" not in text


def test_placeholders_in_data_stay_text():
    assert json.loads(DATA.findall(render("<!-- style -->"))[0]) == ("<!-- style -->")


def test_numbers_that_are_not_finite_are_null():
    text = render({"values": [float("nan"), [float("inf")], 1.5]})
    assert json.loads(DATA.findall(text)[0]) == {"values": [None, [None], 1.5]}


def test_the_page_names_no_address_elsewhere(recorded):
    text = DATA.sub("", panel_page(recorded[0])).replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[\w.]+\.\w|@import|url\(|\bsrc=", text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere is not a run directory"),
        (["first"], "first contains no recorded steps; record some"),
        (["recorded", "--output", "no/such/folder.html"], "cannot be written (No such file"),
    ],
)
def test_unusable_runs_fail_in_one_line(words, message, recorded, monkeypatch, capsys):
    monkeypatch.chdir(recorded[0].parent)
    assert cli.main(["panel", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_incomplete_recording_is_not_read(recorded, recordings, tmp_path, caplog):
    shutil.copytree(recorded[0], tmp_path / "run")
    (tmp_path / "run/sync/step=000021.json.tmp").write_text('{"step":')
    torn = tmp_path / "run/sync/step=000022.json"
    torn.write_text('{"step":')
    data = json.loads(DATA.findall(panel_page(tmp_path / "run"))[0])
    assert data["recordings"] == recordings
    assert caplog.messages == [f"{torn} is damaged (not JSON); ignored"]
