"""The command `lockstep` serves a script that someone else wrote, or no program at all."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.commands import OF_PACKAGES, OURS

SCRIPT = Path(__file__).with_name("foreign") / "program.py"
DOCS = Path(__file__).parents[1] / "docs"
OF_SCRIPTS = [name for name in OURS if name not in OF_PACKAGES]
CPU = {"OMP_NUM_THREADS": "1"}
FLIP = "+callbacks.flip"
TRACE = ("+callbacks.trace._target_=lockstep.callbacks.trace.Trace", "+callbacks.trace.every=5")
FLIPPED = (f"{FLIP}._target_=lockstep.evidence.callbacks.FlippedBit", f"{FLIP}.step=7")


@pytest.fixture
def lockstep(tmp_path):
    """Run `lockstep WORDS` in a folder; check its exit status, and return what it printed."""

    def run(*words, status=0, limit=900):
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", *map(str, words)],
            cwd=tmp_path,
            env={**os.environ, **CPU},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def train(tmp_path):
    """Train the script's experiment, with overrides."""

    def run(*words):
        command = [sys.executable, str(SCRIPT), *words]
        subprocess.run(command, cwd=tmp_path, env={**os.environ, **CPU}, timeout=400, check=True)

    return run


def test_its_help_lists_what_serves_any_program(lockstep):
    printed = lockstep("--help").stdout
    assert re.findall(r"^  (\w+) ", printed, re.MULTILINE) == OF_SCRIPTS
    assert lockstep("--version").stdout.startswith("lockstep ")


@pytest.mark.parametrize("name", OF_SCRIPTS)
def test_a_command_s_help_shows_how_to_type_it_and_has_no_gap(name, lockstep):
    printed = lockstep(name, SCRIPT, "--help").stdout
    assert " ".join(printed.split()).startswith(f"usage: lockstep {name} {SCRIPT} ")
    assert not re.search(r"""PROGRAM|PACKAGE|\{[^}]*["':]""", printed)


@pytest.mark.parametrize("page", ["commands.md", "testing.md"])
def test_the_options_of_a_page_s_commands_are_those_that_the_help_lists(page, lockstep):
    text = (DOCS / page).read_text("utf-8")
    lines = re.findall(r"^lockstep (\w+) (.*)$", text, re.MULTILINE)
    assert lines
    for name, words in lines:
        printed = lockstep(name, SCRIPT, "--help").stdout
        assert {*re.findall(r"--[\w-]+", words)} <= {*re.findall(r"--[\w-]+", printed)}, name


@pytest.mark.parametrize(
    "words", [["check"], ["drill"], ["compare", "--variant", "seed=3"], ["plan"]]
)
def test_without_a_program_there_is_nothing_to_train(words, lockstep):
    line = lockstep(*words, status=2).stderr
    assert line.startswith(f"lockstep {words[0]}: this command needs a program that trains; name")
    assert line.count("\n") == 1


def test_a_setting_that_the_script_lacks_is_refused_before_it_starts(lockstep):
    line = lockstep("drill", SCRIPT, "module.widht=8", status=2).stderr
    assert line.startswith("lockstep drill: unknown setting module.widht; ")


@pytest.mark.slow
def test_doctor_checks_machines_without_any_program(lockstep):
    report = json.loads(lockstep("doctor", "trainer=cpu", "trainer.devices=2", "--json").stdout)
    assert report["world_size"] == 2
    checks = {finding["check"]: finding["status"] for finding in report["findings"]}
    assert checks["collectives"] == checks["ddp step"] == "ok"
    assert "failure" not in checks.values()


@pytest.mark.slow
def test_check_compares_a_script_on_several_numbers_of_ranks(lockstep):
    logged = ("--log-tolerance", "1e-6")  # its validation loss is a mean of self.log
    printed = lockstep("check", SCRIPT, "--ranks", "1,2", "--steps", "6", *logged).stdout
    hashes = re.findall(r"ranks? +([0-9a-f]{12}) ", printed)
    assert len(hashes) == 2
    assert len({*hashes}) == 1
    assert "equal bit for bit" in printed


@pytest.mark.slow
def test_drill_breaks_a_script_s_runs_and_each_ends_as_promised(lockstep):
    printed = lockstep("drill", SCRIPT, "--steps", "40", "--faults", "2").stdout
    outcomes = re.findall(r"^  (ok|FAILED)  ", printed, re.MULTILINE)
    assert outcomes == ["ok"] * 9
    assert printed.count(" 0 differing weights") == 5


@pytest.mark.slow
def test_verify_confirms_a_script_s_run_and_names_a_flipped_bit(lockstep, train, tmp_path):
    train("run_dir=sound", "trainer.devices=2", "+callbacks=trace")
    result = json.loads(lockstep("verify", SCRIPT, "sound", "--json").stdout)
    assert result["verdict"] == "equal"
    assert result["compared"]["steps of trace.csv"] == {"equal": 10, "of": 10}
    flip = [*FLIPPED, f"{FLIP}.kind=weight", f"{FLIP}.note=note"]
    train("run_dir=flipped", *flip, *TRACE)  # after the flip, so that it sees what the model does
    line = lockstep("verify", SCRIPT, "flipped", status=1).stdout.splitlines()[-1]
    assert line.startswith(f"different: step 8: {(tmp_path / 'note').read_text()}")


@pytest.mark.slow
def test_compare_trains_pairs_of_a_script_and_tells_the_verdict_as_json(lockstep):
    sides = ("--base", "module.lr=1e-5", "--variant", "module.lr=1e-2")
    done = lockstep("compare", SCRIPT, *sides, "max_steps=5", "--folder", "pairs", "--json")
    (comparison,) = json.loads(done.stdout)["comparisons"]
    (variant,) = comparison["variants"]
    assert variant["answer"] == "better"
    assert variant["high"] < 0
    assert len(variant["seeds"]) >= 4
    assert "nats" not in variant["verdict"]
    assert variant["verdict"] in done.stderr


@pytest.mark.slow
def test_panel_and_report_show_a_script_s_run(lockstep, train, tmp_path):
    node = "+callbacks.panel"
    target = f"{node}._target_=lockstep.pages.sync_panel.SyncPanel"
    train(
        "run_dir=seen",
        "trainer.devices=2",
        "batch.exact_micro_size=null",
        target,
        f"{node}.every=5",
    )
    files = sorted(path.name for path in (tmp_path / "seen/sync").iterdir())
    assert files == ["step=000001.json", "step=000005.json", "step=000010.json"]
    recording = json.loads((tmp_path / "seen/sync" / files[1]).read_text())
    assert recording["ranks"] == 2
    assert recording["spread"] == 0
    assert recording["tokens_per_sample"] == 0
    assert len(recording["samples"][0][0].split()) == 64  # numbers of an image
    lockstep("panel", "seen")
    lockstep("report", "seen")
    assert {"panel.html", "report.html"} <= {path.name for path in (tmp_path / "seen").iterdir()}
