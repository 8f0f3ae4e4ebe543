"""A conversation in a real terminal: answers stream, Ctrl-C stops one, Ctrl-D leaves."""

import os
import re
import select
import subprocess
import sys
import time

import pytest

from lockstep_gpt import cli
from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.extras.chat.template import template_of

fcntl, pty, termios = map(pytest.importorskip, ("fcntl", "pty", "termios"))  # not on Windows


@pytest.fixture(scope="module")
def chat_run(saved_run):
    return saved_run(ByteTokenizer(), source="chat", path="conversations.jsonl")


@pytest.fixture(scope="module")
def endless_run(saved_run):
    """A model whose likeliest answer has no end."""
    tokenizer = ByteTokenizer()
    stops = template_of(tokenizer).stop
    return saved_run(tokenizer, never=stops, source="chat", path="conversations.jsonl")


class Terminal:
    """The program in a terminal of its own."""

    def __init__(self, *words):
        self.screen = ""
        self.line, there = pty.openpty()
        command = [sys.executable, "-m", "lockstep_gpt", "chat", *words]
        self.process = subprocess.Popen(
            command,
            stdin=there,
            stdout=there,
            stderr=there,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C then is a signal
        )
        os.close(there)

    def type(self, text):
        os.write(self.line, text.encode())

    def until(self, pattern, position=0, again=""):
        """Return where the text that matches ends on the screen, once it is there.

        `again` is typed once more every ten seconds: Python notices a signal that comes just before
        it waits for a key only with the next one.
        """
        start = typed = time.monotonic()
        while not (match := re.compile(pattern).search(self.screen, position)):
            now = time.monotonic()
            assert now < start + 120, self.screen
            if again and now > typed + 10:
                typed = now
                self.type(again)
            if select.select([self.line], [], [], 0.1)[0]:
                try:
                    self.screen += os.read(self.line, 65536).decode(errors="replace")
                except OSError:  # the program has ended
                    assert re.compile(pattern).search(self.screen, position), self.screen
        return match.end()

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.line)


@pytest.fixture
def terminal():
    terminals = []

    def start(*words):
        terminals.append(Terminal(*map(str, words)))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


@pytest.mark.slow
def test_a_conversation_in_a_real_terminal(terminal, endless_run):
    talk = terminal(endless_run, "--longest", "9000", "--temperature", "0")
    ready = talk.until(r"/help shows the commands, Ctrl-D leaves\r\n> ")
    talk.type("/help\n")
    at = talk.until(r"Ctrl-C  stop an answer\r\n> ", ready)
    talk.type("hi\n")
    at = talk.until(r"hi\r\n(?s:.{20})", at)  # an answer of 9,000 tokens has begun
    talk.type("\x03")
    at = talk.until(r" \(stopped\)\r\n> ", at)
    talk.type("/reset\n")
    at = talk.until(r"the conversation is forgotten\r\n> ", at)
    talk.type("half a line")
    talk.until("half a line", at)
    talk.type("\x03")
    at = talk.until(r"\n> ", at + len("half a line"), again="\x03")
    talk.type("/nonsense\n")
    at = talk.until(r"/nonsense is not a command; /help shows them\r\n> ", at)
    assert talk.process.poll() is None
    talk.type("\x04")
    assert talk.process.wait(timeout=60) == 0
    assert "Traceback" not in talk.screen


def test_a_pipe_may_hold_bytes_that_are_no_text(chat_run, python_of_forks):
    words = [python_of_forks, "-m", "lockstep_gpt", "chat", chat_run, "--longest", "5"]
    done = subprocess.run(words, input=b"hi\xff\n", capture_output=True, check=True)
    assert (done.stdout.count(b"\n") > 0, done.stderr) == (True, b"")


@pytest.fixture
def talk(chat_run, monkeypatch, capsys):
    """Say lines to the program without a terminal; return what it printed."""

    def say(*lines, flags=()):
        inputs = iter(lines)
        monkeypatch.setattr("builtins.input", lambda _: _next(inputs))
        assert cli.main(["chat", str(chat_run), "--longest", "12", *flags]) == 0
        return capsys.readouterr().out

    return say


def _next(lines):
    for line in lines:
        return line
    raise EOFError


def test_the_same_lines_have_the_same_answers_and_a_history(talk):
    once, again = talk("hi", "hi"), talk("hi", "hi")
    assert once == again
    assert talk("hi") == once[: len(talk("hi"))]
    other = talk("hi", "/reset", "hi").partition("the conversation is forgotten\n")[2]
    assert other != once[len(talk("hi")) :]
    assert talk("hi", flags=["--system", "x"]) != talk("hi")


def test_what_no_longer_fits_the_context_is_said(talk):
    output = talk(*6 * ["0123456789"])
    assert "(the oldest 2 messages left out: the context is 64 tokens)" in output
    output = talk(70 * "x", "hi")
    rule = "the newest message has 73 tokens, and the context is model.block_size=64; shorten it"
    assert output.splitlines()[0] == rule
    assert len(output.splitlines()) > 1


def test_blank_lines_are_not_answered_and_exit_leaves(talk):
    assert talk("", "  ", "/exit", "hi") == ""


def test_a_base_model_is_refused_in_one_line(saved_run, capsys):
    run = saved_run(ByteTokenizer(), source="stdlib")
    assert cli.main(["chat", str(run)]) == 2
    rule = "this model was trained on data=stdlib, not on conversations; use generate, or "
    output = capsys.readouterr().err
    assert output == f"lockstep-gpt chat: {rule}fine-tune it with experiment=chat\n"


@pytest.mark.parametrize(
    ("flag", "value"),
    [("longest", "0"), ("temperature", "-1"), ("top-k", "0"), ("top-p", "2"), ("seed", "-1")],
)
def test_an_option_that_cannot_be_is_refused(chat_run, capsys, flag, value):
    assert cli.main(["chat", str(chat_run), f"--{flag}={value}"]) == 2
    output = capsys.readouterr().err
    assert flag.replace("-", "_") in output.replace("-", "_")
    assert output.count("\n") == 1
