"""`lockstep-gpt chat RUN|CHECKPOINT`: a conversation with a model in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lockstep_gpt.data.tokenizer import printable
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.chat.history import Message, chat_template, fit_to_context
from lockstep_gpt.extras.chat.template import Template
from lockstep_gpt.run.trained_model import load_for_inference, parser_of

if TYPE_CHECKING:
    from lockstep_gpt.extras.chat.sampling import Sampling
    from lockstep_gpt.model.gpt import GPT

PROMPT = "> "
HELP = """/reset  forget the conversation
/help   show this
/exit   leave, like Ctrl-D
Ctrl-C  stop an answer"""


def main(arguments: list[str]) -> int:
    """Talk until the end of the input."""
    options = _parser().parse_args(arguments)
    if options.longest is not None and options.longest < 1:
        raise UserError(f"--longest={options.longest} must be at least 1")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"--seed={options.seed} must be from 0 to {2**63 - 1}")
    sampling_of(options, options.seed)
    _, model, config, tokenizer = load_for_inference(options.source, is_plain=True)
    conversation = Conversation(model, chat_template(tokenizer, config), options)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text, from a file or a pipe
    if sys.stdin.isatty():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it
        print("/help shows the commands, Ctrl-D leaves")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (lines can then be edited, and called back)
    while (line := _line()) is not None:
        if line in ("/exit", "/quit"):
            break
        conversation.obey(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("chat", "Talk to a model that was trained on conversations.")
    add = parser.add_argument
    add("--system", help="system message before the conversation")
    add("--longest", type=int, help="maximum tokens per answer (default: model.block_size)")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    add("--top-k", type=int, help="draw from the K likeliest tokens (default: all)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        help="draw from the likeliest tokens with this total probability",
    )
    add("--seed", type=int, default=1337, help="same seed, same answers")
    return parser


def _line() -> str | None:
    """Return the next line; None at the end. Ctrl-C only discards the line."""
    prompt = PROMPT if sys.stdin.isatty() else ""
    while True:
        try:
            return input(prompt)
        except EOFError:
            if sys.stdin.isatty():
                print()
            return None
        except KeyboardInterrupt:
            print()


class Conversation:
    """The messages so far, and the model that answers them."""

    def __init__(self, model: GPT, template: Template, options: argparse.Namespace) -> None:
        self.model = model
        self.template = template
        self.options = options
        self.longest = options.longest or model.config.block_size
        self.messages: list[Message] = []
        self.turns = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system's message."""
        system = self.options.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def obey(self, line: str) -> None:
        """Answer a message, or obey a command."""
        if line == "/reset":
            self.reset()
            print("the conversation is forgotten")
        elif line == "/help":
            print(HELP)
        elif line.startswith("/") and line[1:].isalpha():
            print(f"{line} is not a command; /help shows them")
        elif line.strip():
            self.answer(line)

    def answer(self, line: str) -> None:
        """Print the answer to a message as it grows; Ctrl-C ends it there."""
        messages = [*self.messages, {"role": "user", "content": line}]
        try:
            prompt, left_out = fit_to_context(messages, self.template, self.model.config.block_size)
        except UserError as error:
            print(error)
            return
        if left_out:
            size = self.model.config.block_size
            noun = "message" + "s" * (left_out > 1)
            print(f"(the oldest {left_out} {noun} left out: the context is {size} tokens)")
        pieces: list[str] = []
        with _interruptible():
            for text in self._stream(prompt):
                pieces.append(text)
                output = printable(text) if sys.stdout.isatty() else text
                print(output, end="", flush=True)
        print()
        first = int(bool(self.options.system))  # the system's message is never left out
        history = [*messages[:first], *messages[first + left_out :]]
        self.messages = [*history, {"role": "assistant", "content": "".join(pieces)}]

    def _stream(self, prompt: list[int]) -> Iterator[str]:
        from lockstep_gpt.extras.chat.answering import Answer, stream
        from lockstep_gpt.extras.chat.speech import Speech

        sampling = sampling_of(self.options, self.options.seed + self.turns)
        self.turns += 1
        speech = Speech(self.template.tokenizer)
        answer = Answer(prompt, self.longest, speech, sampling, self.template.stop)
        return stream(self.model, answer)


def sampling_of(options: argparse.Namespace, seed: int) -> Sampling:
    """Return how to draw; raise a `UserError` for an option that can't be."""
    from lockstep_gpt.extras.chat.sampling import Sampling

    return Sampling(options.temperature, options.top_k, options.top_p, seed % 2**63)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end only what is inside."""
    try:
        yield
    except KeyboardInterrupt:
        print(" (stopped)", end="")
