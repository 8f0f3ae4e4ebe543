"""A server of forks: forks belong to their requester, and nothing outlives its owner."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lockstep_gpt.extras.warm import server as servers
from lockstep_gpt.extras.warm.server import (
    Server,
    ServerGoneError,
    import_variables,
    keep_servers,
)

SLEEP = ("time:sleep", [600])
# A server without imports: tests of how it ends fork processes that don't need any.
LIGHT = """
import sys
from lockstep_gpt.extras.warm import program
program.PROCESSES.clear()
program.main(*sys.argv[1:])
"""
# A program that requests a child from a server, prints its id, and waits to be killed.
REQUESTER = """
import os, sys, time
from lockstep_gpt.extras.warm import server as servers
servers.PROGRAM = "light"
server = servers.Server.started(os.environ)
child, = server.fork("time:sleep", [600], ["sleeper"], [os.environ])
print(server.process.pid, child.pid, flush=True)
time.sleep(600)
"""

# Programs that have a server, print its id, and wait to be killed: it still imports, or is stopped.
WITH_A_SERVER = """
import os, signal, sys, time
from lockstep_gpt.extras.warm import server as servers
servers.PROGRAM = "light"
if sys.argv[1] == "importing":
    server = servers.Server.started(os.environ, ["endless"])
else:
    server = servers.Server.forked("own")
    server.fork("builtins:len", [""], ["words"], [os.environ])  # it serves
    os.kill(server.process.pid, signal.SIGSTOP)
print(server.process.pid, flush=True)
time.sleep(600)
"""

# A process with one thread that has imported everything, like an agent; its server is stopped to
# simulate one that hangs.
STOPPED = """
import os, signal
from lockstep_gpt.extras.warm import server
server.ANSWER_SECONDS = 1
hanging = server.Server.forked("own")
os.kill(hanging.process.pid, signal.SIGSTOP)
try:
    hanging.fork("builtins:len", [""], ["words"], [os.environ])
except server.ServerGoneError as error:
    print(hanging.process.returncode, error)
"""
MADE_FILES = """
import atexit, shutil, tempfile
folder = tempfile.TemporaryDirectory(suffix="-made")
other = tempfile.mkdtemp(suffix="-kept")
atexit.register(shutil.rmtree, other)
"""


@pytest.fixture(scope="module")
def server():
    server = Server.started(os.environ)
    yield server
    server.close()


@pytest.fixture
def light(tmp_path, monkeypatch):
    """Let a test's servers start at once; return the environment that they need."""
    (tmp_path / "light.py").write_text(LIGHT)
    monkeypatch.setattr(servers, "PROGRAM", "light")
    path = filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "status"), [("", 0), ("four", 4), ("x" * 200, 200)])
def test_status_is_that_of_the_function(server, text, status):
    (child,) = server.fork("builtins:len", [text], ["words"], [os.environ])
    assert child.wait(30) == status
    assert child.poll() == status


def test_end_that_a_handler_learns_of_first_is_known_to_who_waits(server):
    (child,) = server.fork("subprocess:call", [["sleep", "0.5"]], ["words"], [os.environ])
    before = signal.signal(signal.SIGUSR2, lambda *_: child.wait())
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2))
    timer.start()
    try:
        assert child.wait() == 0
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)


def test_child_is_the_requester_s_own_and_leads_a_session(server):
    (child,) = server.fork(*SLEEP, ["words"], [os.environ])
    stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    assert (int(stat[1]), int(stat[2]), int(stat[3])) == (os.getpid(), child.pid, child.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.05)
    os.killpg(child.pid, signal.SIGTERM)
    assert child.wait(30) == -signal.SIGTERM


def test_child_has_the_environment_folder_streams_and_words_it_was_given(
    server, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    line = "{os.getcwd()} {sys.argv} {os.environ['X']} {sys.path[:2]}"
    program = f'import os, sys; sys.stdout.write(f"{line}\\n")'  # one write: they share the file
    (tmp_path / "told.py").write_text(f"def tell():\n    {program}\n    return 3\n")
    with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w+") as err:
        streams = [0, out.fileno(), err.fileno()]
        environments = [{**os.environ, "X": name, "PYTHONPATH": "/from/it"} for name in "ab"]
        children = server.fork("told:tell", [], ["mod", "arg"], environments, streams)
        assert [child.wait(30) for child in children] == [3, 3]
    expected = {f"{tmp_path} ['mod', 'arg'] {name} ['{tmp_path}', '/from/it']" for name in "ab"}
    assert set((tmp_path / "out").read_text().splitlines()) == expected
    assert (tmp_path / "err").read_text() == ""


def test_a_server_works_on_after_its_folder_was_deleted(light, tmp_path, monkeypatch):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    program = "import os, sys; sys.exit([os.getcwd(), sys.path[0]] != sys.argv and 1)"
    with contextlib.closing(Server.started(light)) as server:
        (child,) = server.fork("time:sleep", [0], ["first"], [light])
        assert child.wait(30) == 0
        monkeypatch.chdir(tmp_path / "second")
        (tmp_path / "first").rmdir()
        (child,) = server.fork("builtins:exec", [program], 2 * [str(tmp_path / "second")], [light])
        assert child.wait(30) == 0


def test_exception_of_the_function_is_shown_and_is_status_1(server, tmp_path):
    with (tmp_path / "err").open("w") as file:
        (child,) = server.fork("builtins:len", [3], ["w"], [os.environ], [0, 1, file.fileno()])
        assert child.wait(30) == 1
    assert "TypeError" in (tmp_path / "err").read_text()


def test_children_draw_different_numbers(server, tmp_path):
    (tmp_path / "draw.py").write_text(
        "import os, random, pathlib, numpy\ndef draw(folder):\n"
        "    numbers = f'{random.random()} {numpy.random.random()}'\n"
        "    pathlib.Path(folder, os.environ['X']).write_text(numbers)\n    return 0\n"
    )
    environments = [{**os.environ, "PYTHONPATH": str(tmp_path), "X": name} for name in "ab"]
    children = server.fork("draw:draw", [str(tmp_path)], ["draw"], environments)
    assert [child.wait(30) for child in children] == [0, 0]
    drawn = [(tmp_path / name).read_text().split() for name in "ab"]
    assert len({*drawn[0], *drawn[1]}) == 4


def test_a_killed_server_is_reported_and_its_children_keep_running(light):
    server = Server.started(light)
    (child,) = server.fork(*SLEEP, ["words"], [os.environ])
    server.process.kill()
    with pytest.raises(ServerGoneError):
        server.fork(*SLEEP, ["words"], [os.environ])
    assert child.poll() is None
    child.kill()
    assert child.wait(30) == -signal.SIGKILL


def test_server_that_answers_no_more_is_ended_within_its_limit():
    done = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(-signal.SIGKILL), "timed", "out"]


@pytest.mark.parametrize("state", ["importing", "stopped"])
def test_no_busy_server_outlives_its_requester(light, tmp_path, wait_for, is_alive, kill, state):
    words = "import pathlib, time\npathlib.Path('imports').touch()\ntime.sleep(600)\n"
    (tmp_path / "endless.py").write_text(words)
    requester = subprocess.Popen(
        [sys.executable, "-c", WITH_A_SERVER, state],
        cwd=tmp_path,
        env=light,
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(requester.stdout.readline())
    wait_for((tmp_path / "imports").exists if state == "importing" else lambda: True)
    assert is_alive(pid)
    requester.kill()
    try:
        wait_for(lambda: not is_alive(pid), 30)
    finally:
        if is_alive(pid):
            kill(pid)
        requester.communicate()


def test_nothing_outlives_a_killed_requester(light, wait_for, is_alive):
    requester = subprocess.Popen(
        [sys.executable, "-c", REQUESTER], env=light, stdout=subprocess.PIPE, text=True
    )
    pids = [int(word) for word in requester.stdout.readline().split()]
    assert all(map(is_alive, pids))
    requester.kill()
    requester.communicate()
    wait_for(lambda: not any(map(is_alive, pids)), 60)


def test_a_closed_standard_input_does_not_matter(server):
    kept_input = os.dup(0)
    os.close(0)
    try:
        (child,) = server.fork("builtins:len", ["four"], ["words"], [os.environ])
        assert child.wait(30) == 4
    finally:
        os.dup2(kept_input, 0)
        os.close(kept_input)


def test_resources_of_a_server_s_modules_end_with_the_server_only(light, tmp_path):
    environment = {**light, "TMPDIR": str(tmp_path)}
    (tmp_path / "makes.py").write_text(MADE_FILES)
    server = Server.started(environment, ["makes"])
    (child,) = server.fork("builtins:len", [""], ["words"], [environment])
    assert child.wait(30) == 0
    leftovers = {path.name.partition("-")[2] for path in tmp_path.glob("*-*")}
    assert leftovers == {"made", "kept"}
    server.close()
    assert not [*tmp_path.glob("*-made"), *tmp_path.glob("*-kept")]


def test_servers_differ_only_in_variables_that_imports_read():
    same = {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0"}
    assert import_variables({**same, "HOME": "/", "RANK": "3"}) == same


def test_server_is_kept_until_the_outermost_block_ends():
    class Fake:
        closed = 0

        def close(self):
            self.closed += 1

    fake, before = Fake(), (servers._keepers, dict(servers._servers))
    servers._keepers = 0
    servers._servers.clear()
    try:
        with keep_servers():
            with keep_servers():
                servers._servers["key"] = fake
            assert not fake.closed
        assert (fake.closed, servers._servers) == (1, {})
    finally:
        servers._keepers = before[0]
        servers._servers.update(before[1])


def test_server_has_one_thread_once_it_has_forked(server):
    (child,) = server.fork("builtins:len", [""], ["words"], [os.environ])
    assert child.wait(30) == 0
    assert "Threads:\t1\n" in Path(f"/proc/{server.process.pid}/status").read_text()


WITHOUT = """
import sys
from lockstep_gpt import processes
from lockstep_gpt.extras.warm import import_patches, program
with import_patches.without_transformers():
    processes.import_all(program.PROCESSES)
assert "transformers" not in sys.modules
from torchmetrics.text.bert import BERTScore
from torchmetrics.functional.text import bert
print(bert.AutoModel.__module__)
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
def test_transformers_is_imported_only_by_who_asks_for_a_metric_that_needs_it():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("transformers.")
