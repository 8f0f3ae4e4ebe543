"""An HTTP server of a folder, which cuts connections, fails, or is slow as a test wants."""

import http.server
import re
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import fsspec
import pytest

from lockstep.tokens.sources import files


class Faults:
    """What goes wrong.

    Args:
        cuts: for each answer in turn, after how many bytes of the body it is cut; then none is.
        failures: how many requests for a file get the status 503 first.
        parts: whether the server sends parts of files.
        pause: seconds before each answer.
    """

    def __init__(self, cuts=(), failures=0, parts=True, pause=0.0):
        self.cuts = [*cuts]
        self.failures = failures
        self.parts = parts
        self.pause = pause
        self.sent = {}  # name -> bytes sent

    def next_cut(self):
        return self.cuts.pop(0) if self.cuts else None


class Handler(http.server.SimpleHTTPRequestHandler):
    """Answers as the faults say."""

    def __init__(self, *args, faults, **kwargs):
        self.faults = faults
        super().__init__(*args, **kwargs)

    def log_message(self, *_):
        """Print nothing."""

    def do_GET(self):
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            super().do_GET()
            return
        sent = self.faults.sent  # at the request: a test may begin another count meanwhile
        time.sleep(self.faults.pause)
        if self.faults.failures:
            self.faults.failures -= 1
            self.send_error(503)
            return
        content = path.read_bytes()
        start, end = 0, len(content)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and self.faults.parts:
            start, end = int(asked[1]), min(int(asked[2]) + 1, end)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        cut = self.faults.next_cut()
        body = content[start:end][:cut]
        sent[path.name] = sent.get(path.name, 0) + len(body)
        self.wfile.write(body)
        self.close_connection = True

    def do_HEAD(self):
        if not self.faults.parts:
            super().do_HEAD()
            return
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            super().do_HEAD()
            return
        self.send_response(200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(path.stat().st_size))
        self.end_headers()


class Server(http.server.ThreadingHTTPServer):
    """Prints nothing if a client ends a connection."""

    def handle_error(self, *_):
        """Ignore it."""


@contextmanager
def serve(folder, **faults):
    """Serve a folder; the value is its URL and the faults, which may be changed."""
    happening = Faults(**faults)
    handler = partial(Handler, directory=str(folder), faults=happening)
    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", happening
        finally:
            server.shutdown()


@pytest.fixture
def serving(monkeypatch):
    """A function that serves a folder, with faults; clients don't wait between their tries."""
    monkeypatch.setattr(files, "WAIT", 0.0)
    fsspec.filesystem("http").dircache.clear()
    return serve
