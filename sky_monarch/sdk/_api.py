"""What the synchronous and the asynchronous client of the controller share: requests, patience, cursors."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sky_monarch import __version__, errors
from sky_monarch.launch.folder import Phase, RunFolder
from sky_monarch.sdk._archive import Selection, log_lines
from sky_monarch.sdk._http import load_httpx
from sky_monarch.sdk.types import Event, LogLine, RunStatus

if TYPE_CHECKING:
    import httpx

__all__ = [
    "BASE_URL",
    "EventCursor",
    "LogCursor",
    "Patience",
    "failure",
    "headers",
    "reach",
    "status_of",
    "timeout",
    "transient",
]

#: The host is only a name: the transport is a unix socket.
BASE_URL = "http://controller"

_CONNECT_S = 5.0
_REQUEST_S = 10.0
_LEAST_S = 0.5
#: A stream that follows is kept alive with an empty line every few seconds; one that is silent for this long
#: comes from a controller that is stopped or wedged, and is opened anew.
_FOLLOW_S = {"/v1/events": 30.0, "/v1/logs": 30.0}


_UNREADABLE = b'{"error": {"message": "the status that the controller answered with cannot be read"}}'

#: Longest time from the loss of a head to when its launcher is certain of it; Slurm alone takes half a minute.
_HEAD_LOST_S = 180.0


class Unreadable(errors.ChannelError):
    """The controller answers, and not as this version understands."""


class Interrupted(errors.ChannelError):
    """The controller cannot say more just now: its agent is not connected."""


def headers(folder: RunFolder) -> dict[str, str]:
    """Authorization of this run."""
    token = folder.token
    return {"Authorization": f"Bearer {token}"} if token else {}


def reach(folder: RunFolder) -> None:
    """Have the controller answer at the run's socket, where it is on another machine. It may take seconds then.

    Raises:
        Interrupted: That machine cannot be reached now.
    """
    if folder.head is None:
        return
    from sky_monarch.launch.door import open_door

    try:
        open_door(folder)
    except errors.ChannelError as error:
        raise Interrupted(str(error), hint=error.hint) from error


def status_of(folder: RunFolder, body: bytes) -> RunStatus:
    """The status that a controller answered with. Its folder is the one here, wherever the controller has its own.

    Raises:
        Unreadable: It is none that this version understands.
    """
    values = json.loads(body)
    try:
        return RunStatus.from_json({**values, "run_dir": str(folder.path)} if folder.head else values)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        found = failure(folder, 200, _UNREADABLE)
        raise Unreadable(str(found), hint=found.hint) from error


def timeout(path: str = "", *, follow: bool = False, patience_s: float = _REQUEST_S) -> httpx.Timeout:
    """Deadlines of one request; none of whoever has less patience is longer than that."""
    most_s = min(_REQUEST_S, max(_LEAST_S, patience_s))
    read_s = _FOLLOW_S[path] if follow else most_s
    found: httpx.Timeout = load_httpx().Timeout(most_s, connect=min(_CONNECT_S, most_s), read=read_s)
    return found


def transient() -> tuple[type[Exception], ...]:
    """Errors after which the same request may succeed: the agent restarts a dead controller."""
    httpx = load_httpx()
    return (httpx.TransportError, json.JSONDecodeError, Interrupted)


def failure(folder: RunFolder, status_code: int, body: bytes) -> errors.SkyMonarchError:
    """The error that an answer stands for; of a run of another version with both of them, and what to use instead."""
    try:
        error = json.loads(body)["error"]
        message, hint = str(error["message"]), error.get("hint")
    except (ValueError, KeyError, TypeError):
        message, hint = f"the controller answered {status_code}", None
    kind: type[errors.SkyMonarchError]
    kind = {
        400: errors.ConfigError,
        401: errors.PeerRefusedError,
        404: errors.ConfigError,  # the run is known, so it is a replica or rank that is not
        409: Interrupted,
    }.get(status_code, errors.ChannelError)
    if kind is not Interrupted and (other := _other_version(folder)) is not None:
        message, hint = f"{message}; {other[0]}", other[1]
    return kind(message, hint=hint)


def _other_version(folder: RunFolder) -> tuple[str, str] | None:
    """What to say of a run that another version launched, and how it is reached; None where it is of this one."""
    launched = folder.info.get("version")
    if not launched or launched == __version__:
        return None
    said = f"{folder.run_id} was launched by sky-monarch {launched}, and this is {__version__}"
    if (argv := folder.agent_argv) and argv[0] != sys.executable:
        return said, f"`{argv[0]} -m sky_monarch` is the one that launched it"
    return said, f"`pip install sky-monarch=={launched}`, of which the run goes on to its end"


class Patience:
    """How long to go on asking a controller that does not answer.

    Args:
        folder: Whose controller.
        limit_s: Longest time without any answer.
        follow: Whether whoever asks goes on until the run ends: then a head that is a cluster may be lost meanwhile,
            and is waited for until somebody has found that out.
    """

    def __init__(self, folder: RunFolder, *, limit_s: float = 20.0, follow: bool = False) -> None:
        self._folder = folder
        self._limit_s = max(limit_s, _HEAD_LOST_S) if follow and folder.head is not None else limit_s
        self.reset()

    def reset(self) -> None:
        """Something answered."""
        self._since: float | None = None
        self._delay_s = 0.05

    def delay_s(self, error: Exception | None = None) -> float:
        """Seconds to wait before the next attempt: 0 where the run has ended and the archive knows all.

        Raises:
            ChannelTimeoutError: The limit is over.
        """
        phase = self._folder.phase()
        if phase in (Phase.ENDED, Phase.LOST):
            return 0.0
        if phase is Phase.LAUNCHING and self._folder.head is not None:  # (again): that has limits of its own
            self.reset()
            return 1.0
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since > self._limit_s:
            why = f": {error}" if error is not None and str(error) else ""
            where, hint = "", f"its log is {self._folder.path / 'controller.log'}"
            if (head := self._folder.head) is not None:
                where, name = f", on the cluster {head},", self._folder.name
                hint = (
                    f"`sky-monarch attach {name}` starts its launcher, which finds out what became of the head; "
                    f"`sky-monarch down {name}` ends the run, its hosts and its head"
                )
            raise errors.ChannelTimeoutError(
                f"the controller of {self._folder.run_id}{where} has not answered for {self._limit_s:.0f} s{why}",
                hint=hint,
            ) from error
        delay_s, self._delay_s = self._delay_s, min(1.0, self._delay_s * 2)
        return delay_s


class EventCursor:
    """Where a reader of events is, over reconnects.

    Args:
        after: Id of the last event that it knows.
    """

    def __init__(self, after: int) -> None:
        self.after = after

    def query(self, *, follow: bool) -> dict[str, str]:
        """Parameters of the next request."""
        return {"after": str(self.after), "follow": str(int(follow))}

    def accept(self, line: str) -> Event | None:
        """Take one line of the stream; None where it holds nothing new."""
        if not line.strip():
            return None
        return self.pass_on(Event.from_json(json.loads(line)))

    def pass_on(self, event: Event) -> Event | None:
        """Take one event; None where it is known already."""
        if event.id <= self.after:
            return None
        self.after = event.id
        return event


class LogCursor:
    """Where a reader of log lines is, over reconnects: how many lines of each process it has had.

    Args:
        selection: What it reads.
        tail: It began with the last ``tail`` lines; None: at the beginning.
    """

    def __init__(self, selection: Selection, tail: int | None) -> None:
        self._selection = selection
        self._tail = tail
        self._had: Counter[tuple[int | None, int | None, int]] = Counter()
        self._skip: Counter[tuple[int | None, int | None, int]] = Counter()

    def query(self, *, follow: bool) -> dict[str, str]:
        """Parameters of the next request."""
        query: dict[str, Any] = {**self._selection.query(), "follow": str(int(follow))}
        if self._tail is not None:
            # Nobody can say how many lines came while the controller was away: go on with new ones.
            query["tail"] = str(0 if self._had else self._tail)
        return query

    def rewind(self) -> None:
        """The stream starts over: skip what was had already."""
        self._skip = Counter(self._had) if self._tail is None else Counter()

    def rest(self, folder: RunFolder) -> Iterator[LogLine]:
        """What the archive of an ended run holds beyond what was had."""
        if self._tail is not None and self._had:
            return  # without a known place in the file, lines would come twice
        self.rewind()
        yield from filter(None, map(self.pass_on, log_lines(folder, self._selection, tail=self._tail)))

    def accept(self, line: str) -> LogLine | None:
        """Take one line of the stream; None where it was had already."""
        if not line.strip():
            return None
        value = json.loads(line)
        if "line" not in value and "error" in value:
            raise Interrupted(str(value["error"].get("message")))
        return self.pass_on(LogLine.from_json(value))

    def pass_on(self, line: LogLine) -> LogLine | None:
        """Take one log line; None where it was had already."""
        key = (line.replica, line.rank, line.generation)
        if self._skip[key] > 0:
            self._skip[key] -= 1
            return None
        self._had[key] += 1
        return line
