"""The HTTP API: what clients may ask and order. Nobody without the run's token gets past the door."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from sky_monarch.controller.api_hosts import Hosts, host_routes
from sky_monarch.controller.api_scale import Scales, scale_route
from sky_monarch.controller.logs import Line
from sky_monarch.controller.outputs import Outputs
from sky_monarch.controller.questions import Process
from sky_monarch.errors import ChannelError, ConfigError, RunNotFoundError, SkyMonarchError

__all__ = ["Run", "make_app"]

_PAGE = 500
_NDJSON = "application/x-ndjson"
_MAX_BODY_BYTES = 64 * 1024
_MAX_GRACE_S = 3600.0
_DEFAULT_GRACE_S = 10.0
_KEEP_ALIVE_S = 5.0
_ALL_BYTES = 2**62


class Run(Scales, Protocol):
    """What the API needs of the controller."""

    outputs: Outputs

    @property
    def hosts(self) -> Hosts:
        """Serves those who provision."""
        ...

    def status(self) -> dict[str, Any]:
        """The RunStatus document."""
        ...

    def events(self, after: int, limit: int) -> list[dict[str, Any]]:
        """Events with an id above ``after``, in order."""
        ...

    async def more_events(self, after: int, timeout_s: float) -> bool:
        """Wait for an event above ``after``; False where none came in time."""
        ...

    def ended(self) -> bool:
        """Whether the run is over and its last event is written."""
        ...

    def down(self, grace_s: float, reason: str) -> None:
        """End the run; idempotent."""
        ...


def make_app(run: Run, token: str) -> ASGIApp:
    """The API as an ASGI application."""

    async def status(_request: Request) -> Response:
        return JSONResponse(run.status())

    async def events(request: Request) -> Response:
        after = _whole(request, "after", 0) or 0
        return StreamingResponse(_event_lines(run, request, after, _flag(request)), media_type=_NDJSON)

    async def logs(request: Request) -> Response:
        processes = _processes(run, request)
        stream = run.outputs.reader.lines(
            processes,
            generation=_whole(request, "generation", None),
            tail=_whole(request, "tail", None),
            follow=_flag(request),
        )
        return StreamingResponse(_log_lines(stream), media_type=_NDJSON)

    async def raw(request: Request) -> Response:
        processes = _processes(run, request)
        if len(processes) != 1:
            raise ConfigError("exact bytes are to be had of one process", hint="give both replica and rank")
        stream = run.outputs.reader.raw(processes[0], _whole(request, "generation", None))
        # The first bytes are read before the answer begins, so that an unreachable agent is an honest error.
        first = await anext(stream, b"")
        return StreamingResponse(_prepend(first, stream), media_type="application/octet-stream")

    async def archive(request: Request) -> Response:
        stream = run.outputs.tar(_whole(request, "max_bytes", None) or _ALL_BYTES)
        return StreamingResponse(stream, media_type="application/x-tar")

    async def down(request: Request) -> Response:
        order = await _body(request)
        grace_s = order.get("grace_s", _DEFAULT_GRACE_S)
        reason = order.get("reason") or "down was called"
        # The comparison refuses NaN as well.
        number = isinstance(grace_s, int | float) and not isinstance(grace_s, bool)
        if not number or not 0 <= grace_s <= _MAX_GRACE_S:
            raise ConfigError(f"grace_s must be a number of seconds from 0 to {_MAX_GRACE_S:g}")
        if not isinstance(reason, str) or len(reason) > 1000:
            raise ConfigError("reason must be a text of at most 1000 characters")
        run.down(float(grace_s), reason)
        return JSONResponse({"state": run.status()["state"]}, status_code=202)

    app = Starlette(
        routes=[
            Route("/v1/status", status, methods=["GET"]),
            Route("/v1/events", events, methods=["GET"]),
            Route("/v1/logs", logs, methods=["GET"]),
            Route("/v1/logs/raw", raw, methods=["GET"]),
            Route("/v1/logs/archive", archive, methods=["GET"]),
            Route("/v1/down", down, methods=["POST"]),
            scale_route(run, _body),
            *host_routes(run.hosts, _body),
        ],
        exception_handlers={
            SkyMonarchError: _refused,
            HTTPException: _http_error,
            Exception: _broken,
        },
    )
    return _Door(app, token)


class _Door:
    """Lets only holders of the token in, before anything of a request is looked at."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = b""
            for name, value in scope["headers"]:
                if name == b"authorization":
                    given = value
            if not hmac.compare_digest(given, self._expected):
                error = _error(401, "unauthorized", "the run's token is missing or wrong", None)
                await error(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _event_lines(run: Run, request: Request, after: int, follow: bool) -> AsyncIterator[bytes]:
    spoke_s = time.monotonic()
    while True:
        over = run.ended()  # asked first: what was written before the end is still read below
        while page := run.events(after, _PAGE):
            after = page[-1]["id"]
            yield b"".join(_ndjson(event) for event in page)
            spoke_s = time.monotonic()
            await asyncio.sleep(0)
        if over or not follow or await request.is_disconnected():
            return
        if time.monotonic() - spoke_s >= _KEEP_ALIVE_S:
            # A run that goes well has no events for hours: an empty line says that this process does, too.
            yield b"\n"
            spoke_s = time.monotonic()
        await run.more_events(after, timeout_s=1.0)


async def _log_lines(stream: AsyncIterator[list[Line]]) -> AsyncIterator[bytes]:
    try:
        async for lines in stream:
            # An empty line keeps a silent stream alive.
            yield b"".join(_ndjson(line.document()) for line in lines) or b"\n"
            await asyncio.sleep(0)
    except ChannelError as error:
        # The status line is sent already: the last line of the stream says what went wrong.
        yield _ndjson({"error": {"kind": "agent_unreachable", "message": str(error), "hint": error.hint}})


async def _prepend(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for data in rest:
        yield data


def _ndjson(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(errors="replace") + b"\n"


def _processes(run: Run, request: Request) -> list[Process]:
    setup = request.query_params.get("replica") == "setup"
    replica = None if setup else _whole(request, "replica", None)
    rank = _whole(request, "rank", None)
    processes = run.outputs.processes(replica, rank, setup=setup)
    if not processes:
        what = "setup" if setup else f"replica {'*' if replica is None else replica}"
        raise RunNotFoundError(f"this run has no {what}{'' if rank is None else f', rank {rank}'}")
    return processes


def _whole(request: Request, key: str, default: int | None) -> int | None:
    text = request.query_params.get(key)
    if text is None or text == "":
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ConfigError(f"{key}={text!r:.40} is not a whole number")
    return int(text)


def _flag(request: Request) -> bool:
    text = request.query_params.get("follow", "0")
    if text not in ("0", "1"):
        raise ConfigError(f"follow={text!r:.40} is neither 0 nor 1")
    return text == "1"


async def _body(request: Request) -> dict[str, Any]:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise ConfigError(f"the body is larger than {_MAX_BODY_BYTES} bytes")
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError("the body is not JSON") from error
    if not isinstance(value, dict):
        raise ConfigError("the body is not a JSON object")
    return value


def _error(status: int, kind: str, message: str, hint: str | None) -> JSONResponse:
    return JSONResponse({"error": {"kind": kind, "message": message, "hint": hint}}, status_code=status)


async def _refused(_request: Request, error: Exception) -> Response:
    hint = getattr(error, "hint", None)
    if isinstance(error, ConfigError):
        return _error(400, "bad_request", str(error), hint)
    if isinstance(error, RunNotFoundError):
        return _error(404, "not_found", str(error), hint)
    if isinstance(error, ChannelError):
        return _error(409, "agent_unreachable", str(error), hint)
    return _error(500, "internal", str(error), hint)


async def _http_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 405:
        return _error(400, "bad_request", "this route does not know that method", None)
    kind = "not_found" if error.status_code == 404 else "bad_request"
    return _error(error.status_code, kind, error.detail, None)


async def _broken(_request: Request, error: Exception) -> Response:
    return _error(500, "internal", f"{type(error).__name__} in the controller", "its log has the traceback")
