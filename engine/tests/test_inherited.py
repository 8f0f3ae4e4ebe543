"""What a process inherits from the shell or the program that starts it must not harm a run."""

import io
import os
import signal
import sys

import pytest

from lockstep import commands as cli

RUN = ("-m", "lockstep_gpt")
# Starts a Python that ignores signals, as under `nohup`, and has no standard streams.
BARE = """
import os, signal, sys
for signum in (signal.SIGCHLD, signal.SIGHUP):
    signal.signal(signum, signal.SIG_IGN)
for number in range(3):
    os.close(number)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
FAILS = """
import os, time, lightning
class Fails(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 2:
            open("waits", "w").close()
            while not os.path.exists("go on"):
                time.sleep(0.02)
            raise ZeroDivisionError("on purpose")
"""
CALLBACK = "+callbacks.fails._target_=fails.Fails"


@pytest.mark.slow
def test_a_run_without_streams_ignores_hangups_and_reports_its_failure(
    command, wait_for, processes_of
):
    (command.folder / "fails.py").write_text(FAILS)
    words = command.smoke(CALLBACK, f"run_dir={command.folder}/run")
    path = {"PYTHONPATH": str(command.folder)}
    process = command.start_words([sys.executable, "-c", BARE, *RUN, *words], **path)
    wait_for((command.folder / "waits").exists)
    for pid in {process.pid, *processes_of(command.folder)}:
        os.kill(pid, signal.SIGHUP)
    (command.folder / "go on").touch()
    process.communicate(timeout=240)
    assert process.returncode == 1
    assert command.summary("run")["status"] == "failed"
    assert "ZeroDivisionError: on purpose" in (command.folder / "run/failed.json").read_text()


ENDLESS = """
import lightning
class Endless(lightning.Callback):
    def on_save_checkpoint(self, *_):
        open("saves", "w").close()
"""


@pytest.mark.slow
def test_an_interrupt_that_also_ends_the_reader_of_the_output_saves(command, wait_for):
    (command.folder / "endless.py").write_text(ENDLESS)
    callback = "+callbacks.endless._target_=endless.Endless"
    words = command.smoke("max_steps=100000", callback, "run_dir=run")
    path = {"PYTHONPATH": str(command.folder)}
    process = command.start_words([sys.executable, *RUN, *words], **path)
    wait_for((command.folder / "saves").exists)
    process.stdout.close()  # as `tee` does when it gets the same Ctrl-C
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=240) == 128 + signal.SIGINT
    summary = command.summary("run")
    assert (summary["status"], summary["saved"]) == ("stopped", True)


def test_a_character_that_the_terminal_lacks_is_shown_as_a_code(command, monkeypatch):
    path = command.folder / "screen"
    monkeypatch.chdir(command.folder)
    with io.TextIOWrapper(path.open("wb"), "ascii") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        words = ("launch.inline=true", "run_dir=run", "callbacks.sample.prompt='d\u00e9f'")
        status = cli.main(command.smoke(*words))
        monkeypatch.undo()
    assert status == 0
    assert "d\\xe9f" in path.read_text()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
def test_a_launcher_s_variable_that_is_no_number_is_named_in_one_line(command, name):
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    variables[name] = "abc"
    error = command(*command.smoke("run_dir=run"), status=2, **variables).stderr
    assert len(error.splitlines()) == 1
    assert f" train: {name}=abc must be a whole number; " in error
    assert not (command.folder / "run").exists()
