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
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sky_monarch.errors import ConfigError, LaunchError

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
    "knew",
    "launch",
    "launched",
    "look_up",
    "result",
    "ssh",
    "status",
    "tail_logs",
]

T = TypeVar("T")
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
#: Of one call: the SDK waits without end for a server that has accepted a connection and is silent.
_CALL_S = 60.0
#: Of a call that may send the working folder to an API server elsewhere.
_UPLOAD_S = 1800.0
_START_S = 180.0
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
    try:
        return importlib.util.find_spec("sky") is not None
    except ImportError:
        return False


def look_up(task: Mapping[str, Any]) -> Verdict:
    """Ask the catalogs of the installed SkyPilot for one task.

    What SkyPilot prints on the way, on the standard output of a plan that may be JSON, is dropped: progress of what it
    fetches, and errors that the verdict has.

    Raises:
        ConfigError: SkyPilot is not installed, or does not take this task.
    """
    # From the import on: its log keeps the stream that it finds then.
    with contextlib.redirect_stdout(io.StringIO()):
        return _look_up(task)


def _look_up(task: Mapping[str, Any]) -> Verdict:
    try:
        import sky
        from sky import exceptions
    except ImportError as error:
        raise ConfigError("SkyPilot is not installed", hint="pip install 'sky-monarch[sky]'") from error
    try:
        read = sky.Task.from_yaml_config(dict(task))
    except (ValueError, exceptions.InvalidSkyPilotConfigError) as error:
        raise ConfigError(f"SkyPilot does not take the task {task.get('name')}: {error}") from error
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

_importing = threading.Lock()


def _sky() -> Any:
    try:
        with (
            _importing
        ):  # its modules import each other in circles, which two threads at a time do not survive
            import sky
    except ImportError as error:
        raise SkyPilotError(
            f"SkyPilot cannot be imported: {error}",
            classes=("SkyPilotMissing",),
            hint="pip install 'sky-monarch[sky]'",
        ) from error
    return sky


def _within(limit_s: float, work: Callable[[Any], T]) -> T:
    """Call SkyPilot, with its module; whatever is raised becomes one kind of error, with the names of what it was.

    Raises:
        SkyPilotError: What was raised, or nothing came within ``limit_s``.
    """
    sky = _sky()  # takes seconds, a minute on a busy machine: no part of the limit
    done: list[T] = []
    failed: list[SkyPilotError] = []

    def call() -> None:
        try:
            done.append(work(sky))
        except SkyPilotError as error:
            failed.append(error)
        except Exception as error:  # noqa: BLE001  (what its server or a cloud raised, of any class)
            failed.append(_translated(error))

    caller = threading.Thread(target=call, name="sky", daemon=True)
    caller.start()
    caller.join(limit_s)
    if failed:
        raise failed[0]
    if not done:
        raise SkyPilotError(f"SkyPilot's API server said nothing for {limit_s:.0f} s", classes=("Timeout",))
    return done[0]


def _translated(error: BaseException) -> SkyPilotError:
    classes = [one.__name__ for one in type(error).__mro__ if one not in (BaseException, object)]
    status_code = getattr(getattr(error, "response", None), "status_code", None)
    if status_code in (401, 403):
        classes.insert(0, "ApiServerAuthenticationError")
    elif isinstance(status_code, int) and status_code >= 500:
        classes.insert(0, "ServerTemporarilyUnavailableError")  # its proxy, say
    history = getattr(error, "failover_history", None) or getattr(error, "reasons", None) or ()
    causes = [_translated(cause) for cause in history if isinstance(cause, BaseException)]
    return SkyPilotError(str(error) or type(error).__name__, classes=classes, causes=causes)


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
            classes=("APIVersionMismatchError",),
        )
    raise SkyPilotError(
        f"SkyPilot's API server at {url} does not answer",
        classes=("ApiServerConnectionError",),
        hint=_START_HINT,
    )


def ensure_server() -> None:
    """Start SkyPilot's API server on this machine, unless there is one, or one elsewhere is configured.

    It outlives whoever calls this, so it is for commands: what a run's own processes start ends with the run.

    Raises:
        SkyPilotError: There is none, and it cannot be started.
    """

    def ensure(sky: Any) -> None:
        try:
            _need_server()
        except SkyPilotError as error:
            if not error.is_away:
                raise
            with contextlib.redirect_stdout(io.StringIO()):
                sky.api_start()
            _need_server()

    _within(_START_S, ensure)


def launch(task: Mapping[str, Any], cluster: str) -> str:
    """Ask for a cluster, and for the task as a job on it.

    Returns:
        The id of the request.

    Raises:
        SkyPilotError: The server does not answer, or does not take the task.
    """

    def ask(sky: Any) -> str:
        _need_server()
        try:
            return str(sky.launch(sky.Task.from_yaml_config(dict(task)), cluster_name=cluster))
        except ValueError as error:  # of the task, before anything was asked for
            raise SkyPilotError(
                f"SkyPilot does not take the task {cluster}: {error}", classes=("InvalidSkyPilotConfigError",)
            ) from error

    return _within(_UPLOAD_S, ask)


def find_launch(cluster: str, since_ms: int) -> str | None:
    """The newest request for a launch of a cluster since then (Unix time); None where there is none."""

    def ask(sky: Any) -> str | None:
        _need_server()
        columns = ["request_id", "name", "cluster_name", "created_at", "status"]
        found = [
            request
            for request in sky.api_status(all_status=True, cluster_name=cluster, fields=columns)
            if request.name == _LAUNCH
            and request.cluster_name == cluster
            and request.created_at * 1000 >= since_ms
        ]
        newest = max(found, key=lambda request: request.created_at, default=None)
        return None if newest is None else str(newest.request_id)

    return _within(_CALL_S, ask)


def knew(cluster: str) -> bool:
    """Whether the API server remembers a cluster of this name, standing or not: by a launch, or in its history.

    One that was set up anew does not: that it has no such cluster says nothing of what stands. It keeps requests for a
    day, and the history of clusters for a month.

    Raises:
        SkyPilotError: The server does not answer.
    """
    if find_launch(cluster, 0) is not None:
        return True

    def ask(sky: Any) -> bool:
        _need_server()
        return any(row.get("name") == cluster for row in sky.get(sky.cost_report()))

    return _within(_CALL_S, ask)


def is_done(request_id: str) -> bool:
    """Whether a request has ended, however.

    Raises:
        SkyPilotError: The server does not answer, or does not know it.
    """

    def ask(sky: Any) -> bool:
        columns = ["request_id", "status"]
        found = sky.api_status([request_id], fields=columns)
        if not found:  # also of a server on this machine that does not run
            _need_server()
            found = sky.api_status([request_id], fields=columns)
        if not found:
            raise SkyPilotError(f"SkyPilot knows no request {request_id}", classes=(_FORGOTTEN,))
        return found[0].status in _ENDED

    return _within(_CALL_S, ask)


def result(request_id: str) -> Any:
    """What came of a request that has ended.

    Raises:
        SkyPilotError: What it ended with.
    """
    return _within(_CALL_S, lambda sky: sky.get(request_id))


def launched(request_id: str) -> Cluster:
    """What came of a launch that has ended.

    Raises:
        SkyPilotError: What it ended with.
    """
    _, handle = result(request_id)
    return _cluster(str(handle.cluster_name), "UP", handle)


def cancel(request_id: str) -> None:
    """Have a request end; does not wait for that."""
    _within(_CALL_S, lambda sky: sky.api_cancel([request_id], silent=True))


def down(cluster: str) -> str:
    """Ask for the end of a cluster; returns the id of the request."""

    def ask(sky: Any) -> str:
        _need_server()
        return str(sky.down(cluster))

    return _within(_CALL_S, ask)


def status(names: Sequence[str], *, refresh: bool) -> str:
    """Ask what became of clusters; returns the id of the request.

    Args:
        names: Which; none: all that there are.
        refresh: Have the clouds asked, too; else what SkyPilot has noted.
    """

    def ask(sky: Any) -> str:
        from sky.utils import common

        _need_server()
        mode = common.StatusRefreshMode.FORCE if refresh else common.StatusRefreshMode.NONE
        return str(sky.status(list(names) or None, refresh=mode))

    return _within(_CALL_S, ask)


def clusters(request_id: str) -> list[Cluster]:
    """What :func:`status` asked for: those that there are."""
    return [_cluster(str(one.name), str(one.status.value), one.handle) for one in result(request_id)]


def ssh(cluster: str) -> tuple[str, ...]:
    """How a cluster is reached by SSH: arguments of ``ssh``. SkyPilot writes what it takes into files of its own.

    Its SDK has no call for that; what its commands do (``sky status``) is asked for, so that whatever a place needs (a
    proxy through the API server, a container's port) is right.

    Raises:
        SkyPilotError: The server does not answer, or the cluster is not there.
    """

    def ask(_sky: Any) -> tuple[str, ...]:
        from pathlib import Path

        from sky.client.cli import command
        from sky.utils import cluster_utils

        _need_server()
        with contextlib.redirect_stdout(io.StringIO()):
            command._get_cluster_records_and_set_ssh_config([cluster])
        config = Path(cluster_utils.SSHConfigHelper.ssh_cluster_path.format(cluster)).expanduser()
        if not config.is_file():
            raise SkyPilotError(
                f"SkyPilot says nothing of how {cluster} is reached", classes=("NotReachable",)
            )
        # SkyPilot writes `~`, which is $HOME to SkyPilot, and to ssh what the user's account says.
        named = (line.split(maxsplit=1) for line in config.read_text(encoding="utf-8").splitlines())
        keys = [Path(words[1]).expanduser() for words in named if words[:1] == ["IdentityFile"]]
        return ("-F", str(config), *(word for key in keys for word in ("-i", str(key))), cluster)

    return _within(_CALL_S, ask)


def tail_logs(cluster: str, *, lines: int) -> str:
    """The end of what the newest job of a cluster printed."""

    def ask(sky: Any) -> str:
        _need_server()
        text = io.StringIO()
        sky.tail_logs(cluster, None, False, tail=lines, output_stream=text)
        return text.getvalue()

    return _within(_CALL_S, ask)


def _cluster(name: str, state: str, handle: Any) -> Cluster:
    resources = getattr(handle, "launched_resources", None)
    infra = price = None
    if resources is not None:
        infra = resources.infra.to_str()
        with contextlib.suppress(Exception):  # no catalog on this machine, or none that knows it
            price = round(float(resources.get_cost(3600)) * int(handle.launched_nodes), 4)
    return Cluster(name=name, status=state, place=infra, infra=infra, usd_per_hour=price)
