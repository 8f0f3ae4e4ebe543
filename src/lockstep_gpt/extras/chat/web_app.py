"""The web application: routes, limits, and streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep_gpt import PROGRAM
from lockstep_gpt.errors import RunError, UserError
from lockstep_gpt.extras.chat.connections import CLIENT_SECONDS
from lockstep_gpt.extras.chat.openai_api import ApiError, Request
from lockstep_gpt.extras.chat.openai_requests import Reader, parse_body
from lockstep_gpt.extras.chat.queueing import AnsweringThread, Busy, Stopping
from lockstep_gpt.extras.chat.web_guard import HEADERS, Guard, as_json, page_and_policy


@dataclass(frozen=True)
class Limits:
    """What a request may cost.

    Args:
        body: bytes of a request.
        hosts: names under which the server may be reached, besides IP addresses and `localhost`.
    """

    body: int
    hosts: tuple[str, ...]


class Events(StreamingResponse):
    """A streamed answer, whose job ends with the connection."""

    def __init__(self, events: AsyncIterator[str], left: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **HEADERS}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self.left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until their end, or until the client is gone."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.left()


def web_app(  # noqa: C901 its handlers share its arguments
    reader: Reader, thread: AnsweringThread, limits: Limits
) -> ASGIApp:
    """Return the application that answers with `thread` what `reader` accepts."""
    page, policy = page_and_policy()
    model = {"id": reader.name, "object": "model", "created": 0, "owned_by": PROGRAM}
    model |= {"context": reader.block_size, "longest": reader.longest}

    async def show(_: HttpRequest) -> Response:
        headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store", **HEADERS}
        return Response(page, headers=headers, media_type="text/html")

    async def health(_: HttpRequest) -> Response:
        chats = not isinstance(reader.template, UserError)
        return as_json({"status": "ok", "model": reader.name, "chat": chats, **thread.counts()})

    async def models(_: HttpRequest) -> Response:
        return as_json({"object": "list", "data": [model]})

    async def one_model(request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name != reader.name:
            raise ApiError(404, f"model {name!r} is not {reader.name}", code="model_not_found")
        return as_json(model)

    async def chat(request: HttpRequest) -> Response:
        return await respond(request, reader.chat)

    async def completion(request: HttpRequest) -> Response:
        return await respond(request, reader.completion)

    async def respond(request: HttpRequest, read: Callable[[dict[str, Any]], Request]) -> Response:
        values = parse_body(await _body(request, limits.body))
        wanted = await asyncio.to_thread(read, values)  # tokenizing a long text takes a while
        job = thread.submit(wanted.answer)
        pieces = aiter(job)
        try:
            first = await _unless_gone(request, anext(pieces, None))
            if wanted.stream:
                events = _events(wanted, first, pieces)
                return Events(events, lambda: thread.leave(job))
            text = ""
            if first is not None:
                text = first + await _unless_gone(request, _joined(pieces))
        except BaseException:  # also if this request is cancelled
            thread.leave(job)
            raise
        return as_json(wanted.full_response(text))

    routes = [
        Route("/", show),
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completion, methods=["POST"]),
    ]
    handlers: Any = dict.fromkeys((Exception, *STATUS), _failed)
    return Guard(Starlette(routes=routes, exception_handlers=handlers), limits.hosts)


async def _events(
    wanted: Request, first: str | None, rest: AsyncIterator[str]
) -> AsyncIterator[str]:
    """Yield an answer as server-sent events."""
    try:
        if wanted.is_chat:
            yield _event(wanted.chunk("", first=True))
        if first is not None:
            yield _event(wanted.chunk(first))
            async for text in rest:
                yield _event(wanted.chunk(text))
        yield _event(wanted.chunk("", last=True))
        if wanted.include_usage:
            yield _event(wanted.last_chunk())
    except (Stopping, RunError) as error:  # the status was sent already
        yield _event(_as_api_error(error).content)
    yield "data: [DONE]\n\n"


def _event(content: Any) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


async def _joined(pieces: AsyncIterator[str]) -> str:
    return "".join([text async for text in pieces])


async def _unless_gone(request: HttpRequest, result: Any) -> Any:
    """Return an awaitable's result; end it if the client disconnects before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work = asyncio.ensure_future(result)
    leaving = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ApiError(499, "the client is gone")
    finally:
        work.cancel()
        leaving.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)


async def _body(request: HttpRequest, limit: int) -> bytes:
    body = bytearray()
    too_large = f"the body has more than {limit} bytes; shorten it"
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > limit:
        raise ApiError(413, too_large, headers={"Connection": "close"})
    try:
        async with asyncio.timeout(CLIENT_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise ApiError(413, too_large, headers={"Connection": "close"})
    except ClientDisconnect:
        raise ApiError(499, "the client is gone") from None
    except TimeoutError:
        close = {"Connection": "close"}
        late = f"the body took more than {CLIENT_SECONDS} s; send it faster"
        raise ApiError(408, late, headers=close) from None
    return bytes(body)


STATUS: dict[type[Exception], int] = {
    UserError: 400,
    RunError: 500,
    Stopping: 503,
    Busy: 429,
    ApiError: 0,
    HTTPException: 0,
}


def _as_api_error(error: Exception) -> ApiError:
    """Return an error in OpenAI's form, with the status of its kind."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        rule = "GET / is the page; POST /v1/chat/completions and /v1/completions answer"
        return ApiError(error.status_code, f"{error.detail}; {rule}", headers=headers)
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    if isinstance(error, Busy):
        after = {"Retry-After": str(error.retry)}
        return ApiError(status, str(error), code="rate_limit_exceeded", headers=after)
    if not isinstance(error, tuple(STATUS)):
        return ApiError(status, "the server failed; its log has the cause")
    return ApiError(status, str(error))


async def _failed(_: HttpRequest, error: Exception) -> Response:
    api_error = _as_api_error(error)
    return as_json(api_error.content, api_error.status, api_error.headers)
