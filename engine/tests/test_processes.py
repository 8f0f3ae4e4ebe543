import errno
import os
import signal
import subprocess
import sys
import time

from lockstep_gpt import PROJECT

from lockstep import processes, project

CHILD = """
import sys, time
from lockstep.processes import end_with_parent
end_with_parent(int(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""
PARENT = (
    "import os, subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:], "
    "str(os.getpid())])"
)


def test_the_next_command_shown_reaches_this_installation(tmp_path, monkeypatch):
    script = tmp_path / "bin" / PROJECT.program
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(script.parent))
    monkeypatch.chdir(tmp_path)
    assert processes.typed("check") == f"{sys.executable} -m lockstep_gpt check"
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "dev.py").touch()
    assert processes.typed("check") == "python3 scripts/dev.py check"
    script.parent.mkdir()
    script.touch(mode=0o755)
    assert processes.typed("check") == f"{PROJECT.program} check"


def test_an_agent_which_has_no_project_begins_its_lines_as_the_command_was_typed(monkeypatch):
    monkeypatch.setattr(project, "_begun", [])
    for typed, name in (
        ("my-gpt train", "my-gpt train"),
        ("python3 scripts/dev.py train", "dev.py train"),
        ("/bin/python -m my_gpt train", "my_gpt train"),
        ("python train.py", "train.py"),
        ("train", "train"),
    ):
        monkeypatch.setenv(processes.PROGRAM_VARIABLE, typed)
        assert processes.program_name() == name


def test_what_nobody_sees_in_an_error_is_shown_as_an_escape(capsys):
    processes.print_error("seed=1\r\t\x1b[31m\u200b \ufeff李 é\nnext")
    assert capsys.readouterr().err == "seed=1\\r\\t\\x1b[31m\\u200b \\ufeff李 é\nnext\n"


def test_a_tool_of_this_environment_is_named_so_that_typing_it_here_works(tmp_path, monkeypatch):
    folder = tmp_path / ".venv/bin"
    folder.mkdir(parents=True)
    for name in ("python", "wandb"):
        (folder / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", "")
    assert processes.tool("wandb") == str(folder / "wandb")
    monkeypatch.chdir(tmp_path)
    assert processes.tool("wandb") == ".venv/bin/wandb"
    assert processes.tool("mlflow") == "mlflow", "it isn't installed there"
    monkeypatch.setenv("PATH", str(folder))
    assert processes.tool("wandb") == "wandb"


def test_a_process_ends_soon_after_its_parent_was_killed():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout.readline() == "ready\n"
    parent.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    parent.communicate(timeout=240)  # the pipe ends when the child, which shares it, has ended
    assert time.monotonic() - killed < 30  # it would sleep for a minute


def test_a_process_whose_parent_has_ended_already_ends_at_once():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(gone.pid)], stdout=subprocess.PIPE, timeout=240
    )
    assert (child.returncode, child.stdout) == (-signal.SIGKILL, b"")


def test_exit_handlers_that_hang_do_not_keep_a_process_with_trackers():
    lines = (
        "import atexit, threading",
        "from lockstep.processes import end_process, limit_exit",
        "atexit.register(threading.Event().wait)",
        "limit_exit(0.2)",
        "end_process(3)",
    )
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], timeout=240)
    assert ended.returncode == 3


def test_the_end_of_one_child_ends_the_wait_for_all():
    first, second = (subprocess.Popen(["sleep", seconds]) for seconds in ("0.2", "3600"))
    waited_for = [second.pid, first.pid]
    processes.wait_for_end(waited_for, 3600 if hasattr(os, "pidfd_open") else 30)
    assert (first.poll(), second.poll()) == (0, None)
    second.kill()
    second.wait()


def test_a_kernel_that_cannot_tell_of_an_end_costs_the_whole_wait(monkeypatch):
    def refuse(_):
        raise OSError(errno.ENOSYS, "no such call")

    waits = []
    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    monkeypatch.setattr(processes.time, "sleep", waits.append)
    processes.wait_for_end([os.getpid()], 0.1)
    assert waits == [0.1]
