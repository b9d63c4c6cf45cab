"""Route of the HTTP API for another number of replica groups."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sky_monarch.controller.scale_plan import ScalePlan
from sky_monarch.errors import ConfigError

__all__ = ["Scales", "scale_route"]

_MOST_REASON = 1000
_FIELDS = frozenset({"replicas", "dry_run", "reason"})


class Scales(Protocol):
    """What this route needs of the controller."""

    def scale(self, replicas: int, *, reason: str, dry_run: bool) -> ScalePlan:
        """Have another number of replica groups; idempotent."""
        ...


def scale_route(run: Scales, body: Callable[[Request], Awaitable[dict[str, Any]]]) -> Route:
    """The route.

    Args:
        run: The controller's side.
        body: Reads the JSON object that a request carries.
    """

    async def scale(request: Request) -> Response:
        order = await body(request)
        if unknown := sorted(order.keys() - _FIELDS):
            raise ConfigError(f"unknown field {unknown[0]!r:.40}")
        replicas, dry_run = order.get("replicas"), order.get("dry_run", False)
        reason = order.get("reason") or "scale was called"
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
            raise ConfigError(f"replicas is {replicas!r:.40}, not a whole number of at least 1")
        if not isinstance(dry_run, bool):
            raise ConfigError(f"dry_run is {dry_run!r:.40}, neither true nor false")
        if not isinstance(reason, str) or len(reason) > _MOST_REASON:
            raise ConfigError(f"reason must be a text of at most {_MOST_REASON} characters")
        plan = run.scale(replicas, reason=reason, dry_run=dry_run)
        return JSONResponse(plan.document(dry_run=dry_run), status_code=200 if dry_run else 202)

    return Route("/v1/scale", scale, methods=["POST"])
