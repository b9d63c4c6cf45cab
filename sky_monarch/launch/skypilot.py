"""The only importer of SkyPilot, which costs seconds of processor time: nothing else may need it.

Two things are asked of it. What the catalogs of the installed SkyPilot say about a task: that needs no credentials
and no network, as long as the catalogs are on this machine. And requests to its API server, which answers each with
an id at once: they live in the server, so whoever knows the id can wait for one, also after a restart of ours.

An API server is never started on the way (the SDK would): it would belong to the run that happened to need it, and
end with it. :func:`ensure_server` is for a command that a person typed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sky_monarch.errors import LaunchError

__all__ = [
    "Cluster",
    "SkyPilotError",
    "Verdict",
    "cancel",
    "clusters",
    "down",
    "ensure_server",
    "find_launch",
    "installed",
    "is_done",
    "launch",
    "launched",
    "look_up",
    "result",
    "status",
    "tail_logs",
]

_AWAY = frozenset(
    {
        "ApiServerConnectionError",
        "ConnectionError",
        "RequestInterruptedError",
        "ServerTemporarilyUnavailableError",
        "Timeout",
    }
)
_FORGOTTEN = "RequestNotFound"
_ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})
_LAUNCH = "sky.launch"
_START_HINT = "`sky api start` starts one here; SKYPILOT_API_SERVER_ENDPOINT names another one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What SkyPilot knows for a task.

    Attributes:
        found: ``(instance, dollars an hour of all its nodes)`` of each match, in SkyPilot's own order.
        reason: Why there is none.
    """

    found: tuple[tuple[str, float], ...]
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What SkyPilot knows of a cluster.

    Attributes:
        name: Its name.
        status: ``UP``, ``INIT`` or ``STOPPED``.
        place: Where it is, for people.
        infra: The same as a task says it, as exactly as is known.
        usd_per_hour: What it costs; None where no catalog says.
    """

    name: str
    status: str
    place: str | None
    infra: str | None
    usd_per_hour: float | None


class SkyPilotError(LaunchError):
    """What SkyPilot, its API server or a cloud behind it raised.

    Attributes:
        classes: Names of the class that it had, and of those that this one is derived from.
        causes: For each place that was tried, its error.
    """

    def __init__(
        self,
        message: str,
        *,
        classes: Sequence[str] = (),
        causes: Sequence[SkyPilotError] = (),
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.classes = tuple(classes)
        self.causes = tuple(causes)

    @property
    def is_away(self) -> bool:
        """The API server did not answer: whatever it does, it goes on with."""
        return not _AWAY.isdisjoint(self.classes)

    @property
    def is_forgotten(self) -> bool:
        """The API server does not know such a request."""
        return _FORGOTTEN in self.classes


def installed() -> bool:
    """Whether SkyPilot can be imported. Does not import it."""
    return importlib.util.find_spec("sky") is not None


def look_up(task: Mapping[str, Any]) -> Verdict:
    """Ask the catalogs of the installed SkyPilot for one task.

    Raises:
        LaunchError: SkyPilot is not installed, or does not take this task.
    """
    try:
        import sky
        from sky import exceptions
    except ImportError as error:
        raise LaunchError("SkyPilot is not installed", hint="pip install 'sky-monarch[sky]'") from error
    try:
        read = sky.Task.from_yaml_config(dict(task))
    except (ValueError, exceptions.InvalidSkyPilotConfigError) as error:
        raise LaunchError(f"SkyPilot does not take the task {task.get('name')}: {error}") from error
    found: list[tuple[str, float]] = []
    reasons: list[str] = []
    for resources in read.resources:
        if resources.cloud is None:
            reasons.append("the task names no cloud")
            continue
        try:
            feasible = resources.cloud.get_feasible_launchable_resources(resources, num_nodes=read.num_nodes)
        except (OSError, ValueError, exceptions.NotSupportedError) as error:  # a catalog that is not there
            reasons.append(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        found += [
            (str(match.instance_type), round(match.get_cost(3600) * read.num_nodes, 4))
            for match in feasible.resources_list
        ]
        if not feasible.resources_list:
            reasons.append(feasible.hint or "its catalog has no host like that")
    return Verdict(found=tuple(found), reason=None if found else "; ".join(reasons))


# --- requests to the API server ------------------------------------------------------------------------


def _translated(error: BaseException) -> SkyPilotError:
    classes = [one.__name__ for one in type(error).__mro__ if one not in (BaseException, object)]
    history = getattr(error, "failover_history", None) or getattr(error, "reasons", None) or ()
    causes = [_translated(cause) for cause in history if isinstance(cause, BaseException)]
    return SkyPilotError(str(error) or type(error).__name__, classes=classes, causes=causes)


@contextlib.contextmanager
def _translating() -> Iterator[None]:
    """Whatever is raised in here becomes one kind of error, with the names of what it was."""
    try:
        yield
    except SkyPilotError:
        raise
    except ImportError as error:
        raise SkyPilotError(
            f"SkyPilot is not installed, or not all of it: {error}",
            classes=("ImportError",),
            hint="pip install 'sky-monarch[sky]'",
        ) from error
    except Exception as error:  # what its server raised, of any class
        raise _translated(error) from error


def _need_server() -> None:
    """Make sure that there is an API server, without which the SDK would start one."""
    from sky.server import common

    found = common.get_api_server_status()
    if found.status == common.ApiServerStatus.HEALTHY:
        return
    url = common.get_server_url()
    if found.status == common.ApiServerStatus.NEEDS_AUTH:
        raise SkyPilotError(
            f"SkyPilot's API server at {url} wants to know who we are",
            classes=("ApiServerAuthenticationError",),
            hint="sky api login",
        )
    if found.status == common.ApiServerStatus.VERSION_MISMATCH:
        raise SkyPilotError(
            f"SkyPilot's API server at {url} is of another version: {found.error}",
            classes=("NotSupportedError",),
        )
    raise SkyPilotError(
        f"SkyPilot's API server at {url} does not answer ({found.status.value})",
        classes=("ApiServerConnectionError",),
        hint=_START_HINT,
    )


def ensure_server() -> None:
    """Start SkyPilot's API server on this machine, unless there is one or another one is configured.

    It outlives whoever calls this, so it is for commands: what a run's own processes start ends with the run.

    Raises:
        SkyPilotError: There is none, and it cannot be started.
    """
    with _translating():
        import sky

        try:
            _need_server()
        except SkyPilotError as error:
            if not error.is_away:
                raise
            sky.api_start()
            _need_server()


def launch(task: Mapping[str, Any], cluster: str) -> str:
    """Ask for a cluster, and for the task as a job on it.

    Returns:
        The id of the request.

    Raises:
        SkyPilotError: The server does not answer, or does not take the task.
    """
    with _translating():
        import sky

        _need_server()
        try:
            read = sky.Task.from_yaml_config(dict(task))
        except ValueError as error:
            raise SkyPilotError(
                f"SkyPilot does not take the task {task.get('name')}: {error}",
                classes=("InvalidSkyPilotConfigError",),
            ) from error
        return str(sky.launch(read, cluster_name=cluster))


def find_launch(cluster: str, since_ms: int) -> str | None:
    """The newest request for a launch of a cluster since then (Unix time); None where there is none."""
    with _translating():
        import sky

        _need_server()
        found = [
            request
            for request in sky.api_status(all_status=True)
            if request.name == _LAUNCH
            and request.cluster_name == cluster
            and request.created_at * 1000 >= since_ms
        ]
        newest = max(found, key=lambda request: request.created_at, default=None)
        return None if newest is None else str(newest.request_id)


def is_done(request_id: str) -> bool:
    """Whether a request has ended, however.

    Raises:
        SkyPilotError: The server does not answer, or does not know it.
    """
    with _translating():
        import sky

        found = sky.api_status([request_id])
        if not found:
            raise SkyPilotError(f"SkyPilot knows no request {request_id}", classes=(_FORGOTTEN,))
        return found[0].status in _ENDED


def result(request_id: str) -> Any:
    """What came of a request; waits for it.

    Raises:
        SkyPilotError: What it ended with.
    """
    with _translating():
        import sky

        return sky.get(request_id)


def launched(request_id: str) -> Cluster:
    """What came of a launch.

    Raises:
        SkyPilotError: What it ended with.
    """
    _, handle = result(request_id)
    return _cluster(str(handle.cluster_name), "UP", handle)


def cancel(request_id: str) -> None:
    """Have a request end; does not wait for that."""
    with _translating():
        import sky

        sky.api_cancel([request_id], silent=True)


def down(cluster: str) -> str:
    """Ask for the end of a cluster; returns the id of the request."""
    with _translating():
        import sky

        _need_server()
        return str(sky.down(cluster))


def status(names: Sequence[str], *, refresh: bool) -> str:
    """Ask what became of clusters; returns the id of the request.

    Args:
        names: Which.
        refresh: Have the clouds asked, too; else what SkyPilot has noted.
    """
    with _translating():
        import sky
        from sky.utils import common

        _need_server()
        mode = common.StatusRefreshMode.FORCE if refresh else common.StatusRefreshMode.NONE
        return str(sky.status(list(names), refresh=mode))


def clusters(request_id: str) -> list[Cluster]:
    """What :func:`status` asked for: those that there are."""
    return [
        _cluster(str(one["name"]), str(one["status"].value), one.get("handle")) for one in result(request_id)
    ]


def tail_logs(cluster: str, *, lines: int) -> str:
    """The end of what the newest job of a cluster printed."""
    with _translating():
        import sky

        _need_server()
        text = io.StringIO()
        sky.tail_logs(cluster, None, False, tail=lines, output_stream=text)
        return text.getvalue()


def _cluster(name: str, state: str, handle: Any) -> Cluster:
    resources = getattr(handle, "launched_resources", None)
    place = infra = price = None
    if resources is not None:
        infra = resources.infra.to_str()
        place = infra
        with contextlib.suppress(Exception):  # no catalog on this machine, or none that knows it
            price = round(float(resources.get_cost(3600)) * int(handle.launched_nodes), 4)
    return Cluster(name=name, status=state, place=place, infra=infra, usd_per_hour=price)
