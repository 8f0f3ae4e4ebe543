"""Send requests to the command `serve` from many clients at once; count what comes back.

usage: python lab/benchmarks/load_test.py
           RUN [--clients 100] [--seconds 60] [--serve="--parallel 8"]

Starts a server of its own. Each client sends one request after another; every second one is
streamed. Prints JSON: complete answers, refusals with 429, faults (anything else), latencies in
seconds, and the server's memory in MiB each second. The exit status is 1 if there were faults.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

PATIENCE = 180  # seconds until an answer counts as lost
READY = 300  # seconds until a server must be ready
PROMPTS = ("def f(x", "import os\n", "class A:\n    def __init__(self", "größer (“a”)")


def main() -> int:
    """Measure; print the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--serve", default="", help="options of the server")
    options = parser.parse_args()
    start = [sys.executable, "-m", "lockstep_gpt", "serve"]
    words = [*start, str(options.run), "--port", "0", *shlex.split(options.serve)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            result = asyncio.run(measured(server, options.clients, options.seconds))
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate()
    print(json.dumps({**result, "exit_status": server.returncode}))
    return 1 if result["faults"] or server.returncode else 0


async def measured(
    server: subprocess.Popen[str], clients: int, seconds: float
) -> dict[str, object]:
    """Run all clients for `seconds`; return what they counted."""
    port = await asyncio.wait_for(asyncio.to_thread(port_of, server), READY)
    counts: Counter[str] = Counter()
    latencies: list[float] = []
    end = time.monotonic() + seconds
    watching = asyncio.create_task(memory(server.pid))
    (model,) = json.loads((await exchange(port, b"GET /v1/models HTTP/1.1\r\n", b""))[2])["data"]
    longest = model["context"] // 4  # characters, of up to three bytes
    many = [client(port, number, longest, end, counts, latencies) for number in range(clients)]
    await asyncio.gather(*many)
    after = json.loads((await exchange(port, b"GET /health HTTP/1.1\r\n", b""))[2])
    watching.cancel()
    series = (await asyncio.gather(watching, return_exceptions=True))[0]
    assert isinstance(series, list)
    complete, refused, tokens = (counts.pop(name, 0) for name in ("complete", "refused", "tokens"))
    return {
        "complete": complete,
        "refused": refused,
        "faults": dict(counts),
        "tokens_per_second": round(tokens / seconds),
        "median_latency": round(statistics.median(latencies), 2) if latencies else None,
        "longest_latency": round(max(latencies, default=0), 2),
        "left": after["answering"] + after["waiting"],
        "memory": [round(size) for size in series],
    }


def port_of(server: subprocess.Popen[str]) -> int:
    """Return the port of the line that says the server is ready."""
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("ready: "):
            return int(line.split()[1].rpartition(":")[2])
    raise SystemExit("the server did not start")


async def memory(pid: int) -> list[float]:
    """Return the resident memory in MiB, once a second until canceled."""
    series: list[float] = []
    try:
        while True:
            command = ["ps", "-o", "rss=", "-p", str(pid)]
            series.append(int(subprocess.check_output(command)) / 1024)
            await asyncio.sleep(1)
    except asyncio.CancelledError:
        return series


async def client(
    port: int,
    number: int,
    longest: int,
    end: float,
    counts: Counter[str],
    latencies: list[float],
) -> None:
    """Send one request after another; check that each answer is complete."""
    source = random.Random(number)
    while time.monotonic() < end:
        stream = source.random() < 0.5
        started = time.monotonic()
        wanted = {
            "prompt": (source.choice(PROMPTS) * source.randrange(1, 5))[:longest],
            "max_tokens": source.randrange(1, 65),
            "stream": stream,
            "stream_options": {"include_usage": True} if stream else None,
        }
        line = b"POST /v1/completions HTTP/1.1\r\n"
        try:
            sent = exchange(port, line, json.dumps(wanted).encode())
            status, headers, body = await asyncio.wait_for(sent, PATIENCE)
            if status == 429 and "retry-after" in headers:
                counts["refused"] += 1
                await asyncio.sleep(
                    min(float(headers["retry-after"]), max(0, end - time.monotonic()))
                )
                continue
            usage = checked(status, body, stream)
        except Exception as error:  # every kind of fault is counted
            counts[f"{type(error).__name__}: {error}"[:200]] += 1
            continue
        counts["complete"] += 1
        counts["tokens"] += usage
        latencies.append(time.monotonic() - started)


def checked(status: int, body: bytes, stream: bool) -> int:
    """Return the number of tokens of a complete answer; raise for any other."""
    if status != 200:
        raise ValueError(f"status {status}: {body[:120]!r}")
    if not stream:
        answer = json.loads(body)
    else:
        *events, done, rest = body.decode().split("\n\n")
        if (done, rest) != ("data: [DONE]", ""):
            raise ValueError("a stream ended without its end")
        parts = [json.loads(event.removeprefix("data: ")) for event in events]
        answer = {**parts[-1], "choices": parts[-2]["choices"]}
    if answer["choices"][0]["finish_reason"] not in ("stop", "length"):
        raise ValueError("an answer without its end")
    return int(answer["usage"]["completion_tokens"])


async def exchange(port: int, line: bytes, body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send one request on its own connection; return status, headers, and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        size = str(len(body)).encode()
        head = b"Host: localhost\r\nConnection: close\r\nContent-Length: " + size + b"\r\n\r\n"
        writer.write(line + head + body)
        first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
        pairs = (field.partition(": ") for field in rest if field)
        headers = {name.lower(): value for name, _, value in pairs}
        content = b""
        if headers.get("transfer-encoding") == "chunked":
            while True:
                size_of_part = int(await reader.readline(), 16)
                if size_of_part == 0:
                    break
                content += (await reader.readexactly(size_of_part + 2))[:-2]
        else:
            content = await reader.readexactly(int(headers["content-length"]))
        return int(first.split()[1]), headers, content
    finally:
        writer.close()


if __name__ == "__main__":
    sys.exit(main())
