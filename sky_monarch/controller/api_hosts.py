"""Routes of the HTTP API for those who provision hosts, and for those who want to know of hosts."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sky_monarch.errors import ConfigError

__all__ = ["Hosts", "host_routes"]

_MOST_WAIT_S = 30.0
_PLACES = 19  # digits of a number that SQLite holds


class Hosts(Protocol):
    """What these routes need of the controller."""

    async def wanted(self, after: int, wait_s: float, gone: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        """What is wanted, once it is another version than ``after``, or after ``wait_s``."""
        ...

    def report(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Take what a launcher says of a host."""
        ...

    def facts(self) -> dict[str, Any]:
        """Hosts and their cost."""
        ...

    def place(self, order: Mapping[str, Any]) -> None:
        """Place groups on the hosts of another place."""
        ...

    def head(self, bill: Mapping[str, Any]) -> None:
        """Take since when the head bills, and how much."""
        ...

    def take(self) -> None:
        """Whoever launched the run has taken its end."""
        ...


def host_routes(hosts: Hosts, body: Callable[[Request], Awaitable[dict[str, Any]]]) -> list[Route]:
    """The routes.

    Args:
        hosts: The controller's side.
        body: Reads the JSON object that a request carries.
    """

    async def wanted(request: Request) -> Response:
        after = _version(request.query_params.get("after") or "-1")
        wait_s = _seconds(request.query_params.get("wait_s") or "0")
        answer = await hosts.wanted(after, wait_s, request.is_disconnected)
        return JSONResponse(answer, headers={"Cache-Control": "no-store"})

    async def report(request: Request) -> Response:
        return JSONResponse(hosts.report(await body(request)), status_code=202)

    async def place(request: Request) -> Response:
        hosts.place(await body(request))
        return JSONResponse({}, status_code=202)

    async def head(request: Request) -> Response:
        hosts.head(await body(request))
        return JSONResponse({}, status_code=202)

    async def listed(_request: Request) -> Response:
        return JSONResponse(hosts.facts())

    async def collected(_request: Request) -> Response:
        hosts.take()
        return JSONResponse({}, status_code=202)

    return [
        Route("/v1/collected", collected, methods=["POST"]),
        Route("/v1/head", head, methods=["POST"]),
        Route("/v1/hosts", listed, methods=["GET"]),
        Route("/v1/hosts/wanted", wanted, methods=["GET"]),
        Route("/v1/hosts/placement", place, methods=["POST"]),
        Route("/v1/hosts/report", report, methods=["POST"]),
    ]


def _version(text: str) -> int:
    digits = text.removeprefix("-")
    if not (text.isascii() and digits.isdigit() and len(digits) < _PLACES):
        raise ConfigError(f"after={text!r:.40} is not a whole number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds <= _MOST_WAIT_S:  # refuses NaN as well
        raise ConfigError(f"wait_s={text!r:.40} is not a number of seconds from 0 to {_MOST_WAIT_S:g}")
    return seconds
