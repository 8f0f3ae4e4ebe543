"""What protects the server in a browser: whose requests it accepts, and what its page may do."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep_gpt.extras.chat.openai_api import ApiError

PAGE = Path(__file__).with_name("chat.html")
HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


class Guard:
    """Refuses requests that come by way of someone else's web page.

    A page whose name suddenly resolves to 127.0.0.1 (DNS rebinding) sends its own name as `Host`;
    other pages send their `Origin`.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]) -> None:
        self.app = app
        self.hosts = {"localhost", *(name.lower() for name in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 403."""
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        host = headers.get("host", "")
        origin = headers.get("origin", "")
        error = None
        if not self._is_ours(host):
            error = f"the host {host[:80]!r} is not this server's; add it with --allow-host"
        elif origin and origin.partition("://")[2].lower() != host.lower():
            error = f"pages of {origin[:80]!r} may not use this server; use its own page"
        if error:
            await as_json(ApiError(403, error).content, 403)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name in self.hosts:
                return True
            ipaddress.ip_address(name)
        except ValueError:  # not an address
            return False
        return True


def as_json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response in ASCII, which any text from a request can be written in."""
    text = json.dumps(content)
    return Response(text, status, {**HEADERS, **(headers or {})}, "application/json")


def page_and_policy() -> tuple[str, str]:
    """Return the page and the policy that allows only its own style, script, and server."""
    text = PAGE.read_text(encoding="utf-8")
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    (script,) = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    rules = [
        "default-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "img-src data:",
        "connect-src 'self'",
        f"style-src {_hash(style)}",
        f"script-src {_hash(script)}",
    ]
    return text, "; ".join(rules)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
