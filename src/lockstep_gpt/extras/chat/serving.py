"""`lockstep-gpt serve RUN|CHECKPOINT`: an API like OpenAI's, and a page for it."""

from __future__ import annotations

import argparse
import asyncio
import errno
import functools
import ipaddress
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.chat.history import chat_template
from lockstep_gpt.optional import import_optional
from lockstep_gpt.run.trained_model import load_for_inference, parser_of

if TYPE_CHECKING:
    from lockstep_gpt.extras.chat.queueing import AnsweringThread

CLOSING = 5  # seconds that connections have to close after the last answer


def main(arguments: list[str]) -> int:
    """Serve until a signal; return 0."""
    options = check_options(_parser().parse_args(arguments))
    for name in ("uvicorn", "starlette"):
        import_optional("serve", name, "chat")
    # Before the model is loaded, which takes a while.
    with open_listener(options.host, options.port) as listener:
        _, model, config, tokenizer = load_for_inference(options.source, is_plain=True)
        # Late, so that mistakes are reported at once.
        from lockstep_gpt.extras.chat.openai_requests import Reader
        from lockstep_gpt.extras.chat.queueing import AnsweringThread
        from lockstep_gpt.extras.chat.web_app import Limits, web_app

        try:
            template: Any = chat_template(tokenizer, config)
        except UserError as error:
            template = error
        size = config.model.block_size
        name = options.name or options.source.resolve().name
        reader = Reader(name, tokenizer, template, size, options.longest or size)
        thread = AnsweringThread(model, options.parallel, options.waiting, options.seconds)
        limits = Limits(options.body, (options.host, *options.allow_host))
        if isinstance(template, UserError):
            print(f"only /v1/completions: {template}")
        _serve(web_app(reader, thread, limits), thread, listener, options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("serve", "Answer over HTTP, like OpenAI's API, with a page to try it.")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: only this machine)")
    add("--port", type=int, default=8000, help="0 chooses a free one (default: 8000)")
    add("--name", help="the model's name in the API (default: the run's name)")
    add("--parallel", type=int, default=16, help="requests answered at once (default: 16)")
    add("--waiting", type=int, default=64, help="maximum requests in the queue (default: 64)")
    add("--longest", type=int, help="maximum tokens per answer (default: model.block_size)")
    add("--seconds", type=float, default=120, help="maximum seconds per request (default: 120)")
    add(
        "--grace",
        type=float,
        default=10,
        help="seconds to finish answers after SIGTERM/SIGINT (default: 10)",
    )
    add("--body", type=int, default=1 << 20, help="maximum bytes per request (default: 1 MiB)")
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="also accept this host name, for example a proxy's",
    )
    return parser


def check_options(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options; raise a `UserError` for one that can't be."""
    rules = [
        ("port", 0 <= options.port < 2**16, "must be from 0 to 65535"),
        ("parallel", 1 <= options.parallel <= 1024, "must be from 1 to 1024"),
        ("waiting", options.waiting >= 0, "must be at least 0"),
        ("longest", options.longest is None or options.longest >= 1, "must be at least 1"),
        ("seconds", 0 < options.seconds < 1e6, "must be above 0, and below 1000000"),
        ("grace", 0 <= options.grace < 1e6, "must be at least 0, and below 1000000"),
        ("body", options.body >= 1, "must be at least 1"),
    ]
    for name, fits, rule in rules:
        if not fits:
            raise UserError(f"--{name}={getattr(options, name)} {rule}")
    return options


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens there.

    Raises:
        UserError: the port is in use or not allowed, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it can't be a name"
        raise UserError(f"--host={host} is not an address ({reason}); give one") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            remedy = f"another program uses {host}:{port}; stop it, or choose --port 0"
        else:
            remedy = f"{host}:{port} can't be used ({os.strerror(error.errno or 0)}); choose others"
        raise UserError(remedy) from None
    return listener


def _serve(
    app: Any, thread: AnsweringThread, listener: socket.socket, options: argparse.Namespace
) -> None:
    """Serve until SIGTERM or SIGINT; then answers have `grace` seconds to end."""
    import uvicorn

    from lockstep_gpt.extras.chat.connections import CLIENT_SECONDS, Connection

    class Server(uvicorn.Server):
        """Tells its address; ends what is still computed before it closes connections."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            address, port = listener.getsockname()[:2]
            host = f"[{address}]" if ":" in address else address
            open_to = "" if _is_local(address) else "; anyone who can reach this machine can use it"
            print(f"ready: http://{host}:{port} (Ctrl-C ends it){open_to}", flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            loop = asyncio.get_running_loop()
            ending = loop.call_later(options.grace, loop.run_in_executor, None, thread.stop)
            await super().shutdown(sockets)
            ending.cancel()

    longest = options.seconds + 2 * CLIENT_SECONDS  # sending and reading come on top
    http: Any = functools.partial(Connection, seconds=longest)
    settings: Any = {"http": http, "loop": "asyncio", "ws": "none", "lifespan": "off"}
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(options.grace) + CLOSING,
        **settings,
    )
    # uvicorn raises the signal again after it has ended: then it only ends this function.
    before = {number: signal.signal(number, _ignore) for number in (signal.SIGTERM, signal.SIGINT)}
    thread.start()
    try:
        Server(config).run(sockets=[listener])
    finally:
        thread.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    print("stopped")


def _ignore(*_: object) -> None:
    """Return to where the signal came, instead of ending the process there."""


def _is_local(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
