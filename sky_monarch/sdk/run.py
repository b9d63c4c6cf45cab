"""A run, seen from outside: the synchronous client of its controller."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Self

from sky_monarch.errors import (
    ChannelError,
    ChannelTimeoutError,
    LaunchError,
    SkyMonarchError,
    SystemCallError,
)
from sky_monarch.launch.folder import Phase, RunFolder
from sky_monarch.launch.placement import cluster_name
from sky_monarch.launch.process import carrying
from sky_monarch.sdk import _api, _archive
from sky_monarch.sdk._archive import Selection
from sky_monarch.sdk._glance import silent_status
from sky_monarch.sdk._http import load_httpx
from sky_monarch.sdk.scaling import Scaled, require_live, scale_body
from sky_monarch.sdk.types import Event, LogLine, RunStatus

if TYPE_CHECKING:
    import httpx

__all__ = ["Run"]

_POLL_S = 0.1
#: Beyond its grace time a run gets this long to end in order before it is ended from outside.
_DOWN_MARGIN_S = 20.0
#: With hosts: the controller gives them ten minutes to be gone, and then ends all the same.
_HOSTS_MARGIN_S = 660.0
_ASK_EVERY_S = 10.0
#: The launcher waits for the head as long as that does for its hosts, then ends them from outside, and the head.
_AWAY_MARGIN_S = 2400.0
_ORDER_S = 3.0
_TELL_EVERY_S = 1.0


class Run(AbstractContextManager["Run"]):
    """A handle on one run; it holds no state of its own, so any number of them may exist.

    Args:
        folder: Where the run lives on disk.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._client: httpx.Client | None = None
        self.resumed = False
        """Whether this handle took it up again after it was lost."""

    def __repr__(self) -> str:
        return f"Run({self.run_id!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def run_id(self) -> str:
        """Its id."""
        return self._folder.run_id

    @property
    def name(self) -> str:
        """Its name."""
        return self._folder.name

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts that are brought up for it; none for a run of this machine alone."""
        return self._folder.hosts

    @property
    def folder(self) -> RunFolder:
        """Where it lives on disk."""
        return self._folder

    def close(self) -> None:
        """Close the connection; the run goes on."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _http(self) -> httpx.Client:
        httpx = load_httpx()
        if self._client is None:
            self._client = httpx.Client(
                # A unix socket: no certificates are loaded, which would take most of a status's time.
                transport=httpx.HTTPTransport(uds=str(self._folder.api), verify=False, trust_env=False),
                base_url=_api.BASE_URL,
                headers=_api.headers(self._folder),
                timeout=_api.timeout(),
            )
        return self._client

    def answers(self) -> bool:
        """Whether the controller answers right now (one attempt, 2 s at most)."""
        httpx = load_httpx()
        try:
            _api.reach(self._folder)
        except ChannelError:
            return False
        if not self._folder.api.exists():
            return False
        try:
            return self._http().get("/v1/status", timeout=2.0).status_code == 200
        except httpx.TransportError:
            return False

    def resume(self, *, timeout_s: float = 60.0) -> bool:
        """Take a lost run up again: its agent and the agent's keeper were killed, and its ranks with them.

        It goes on under its id, with its journal and its budgets; each group starts again, which costs it a
        restart, from the last checkpoint where it saves some. What had ended by then stays so. Of a run whose head
        is a cluster it is the launcher that is started again, and nothing else of it had stopped.

        Args:
            timeout_s: Longest wait for the controller to answer.

        Returns:
            False where there is nothing to do: it is live, or it has ended.

        Raises:
            LaunchError: It cannot be taken up again.
            RunExistsError: Another live run has its name.
        """
        from sky_monarch.launch import away, local

        if self._folder.head is not None:
            self._need_server()
            self.resumed = away.resume(self._folder, ready=lambda _: self.answers(), deadline_s=timeout_s)
            return self.resumed
        if self._folder.phase() is Phase.LOST:
            self.resumed = local.resume(self._folder, ready=lambda _: self.answers(), deadline_s=timeout_s)
            return self.resumed
        return False

    def status(self, *, patience_s: float = 20.0) -> RunStatus:
        """What the run is doing now, or how it ended.

        Args:
            patience_s: Longest wait for a controller that is being restarted.

        Raises:
            ChannelTimeoutError: The controller did not answer in time.
        """
        patience = _api.Patience(self._folder, limit_s=patience_s)
        while True:
            if (known := _archive.status(self._folder)) is not None:
                return known
            try:
                _api.reach(self._folder)
                response = self._http().get("/v1/status", timeout=_api.timeout(patience_s=patience_s))
                if response.status_code != 200:
                    raise _api.failure(self._folder, response.status_code, response.content)
                return _api.status_of(self._folder, response.content)
            except _api.transient() as error:
                time.sleep(patience.delay_s(error))

    def glance(self, *, patience_s: float = 2.5) -> tuple[RunStatus, ChannelError | None]:
        """The same within a few seconds, whatever its controller does.

        Args:
            patience_s: Longest wait for the controller, with a margin of the same length for one that hangs.

        Returns:
            The status, and None; where the controller does not answer what the files of the run tell (``reason`` says
            so), and what became of the question.

        Raises:
            ChannelError: It answers, and this version does not understand it.
        """
        try:
            return self.status(patience_s=patience_s), None
        except _api.Unreadable:
            raise
        except ChannelError as error:
            return silent_status(self._folder, str(error)), error

    def wait(self, *, timeout_s: float | None = None) -> RunStatus:
        """Wait for the end of the run, and for its processes to be gone.

        Args:
            timeout_s: Longest wait; None: as long as it takes.

        Raises:
            ChannelTimeoutError: It was still going on after ``timeout_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._folder.phase() in (Phase.LIVE, Phase.LAUNCHING):
            if deadline is not None and time.monotonic() > deadline:
                raise ChannelTimeoutError(f"{self.run_id} was still going on after {timeout_s:g} s")
            time.sleep(_POLL_S)
        self._settle()
        return self.status()

    def _settle(self) -> None:
        """Wait a moment for the agent of an ended run to go, then drop secrets and sockets."""
        deadline = time.monotonic() + _DOWN_MARGIN_S
        while self._folder.agent() is not None:
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)
        if self._folder.phase() is Phase.ENDED:
            self._folder.settle()

    def leftovers(self) -> list[int]:
        """Pids of this run that live on although it has ended or its agent is dead."""
        if self._folder.phase() in (Phase.LIVE, Phase.LAUNCHING):
            return []
        return [process.pid for process in carrying(self.run_id)]

    @property
    def over(self) -> bool:
        """Whether it has ended and nothing of it runs. Looks for itself: no controller is asked."""
        return self._folder.phase() in (Phase.ENDED, Phase.LOST) and not self.leftovers()

    def events(self, *, after: int = 0, follow: bool = False) -> Iterator[Event]:
        """What happened, oldest first.

        Args:
            after: Only events with a larger id.
            follow: Go on until the run ends.

        Raises:
            ChannelTimeoutError: The controller did not answer in time.
        """
        cursor = _api.EventCursor(after)
        patience = _api.Patience(self._folder, follow=follow)
        if self._folder.head is not None:  # one that is lost has told what its successor does not know
            for kept in _archive.events(self._folder, after=after):
                if event := cursor.pass_on(kept):
                    yield event
        while self._folder.phase() is Phase.LIVE or (follow and self._folder.phase() is Phase.LAUNCHING):
            try:
                for line in self._stream("/v1/events", cursor.query(follow=follow), follow=follow):
                    patience.reset()
                    if event := cursor.accept(line):
                        yield event
                if not follow:
                    return
                time.sleep(patience.delay_s())
            except _api.transient() as error:
                time.sleep(patience.delay_s(error))
        yield from _archive.events(self._folder, after=cursor.after)

    def logs(
        self,
        *,
        replica: int | None = None,
        rank: int | None = None,
        generation: int | None = None,
        setup: bool = False,
        tail: int | None = None,
        follow: bool = False,
    ) -> Iterator[LogLine]:
        """Captured output, line by line.

        Args:
            replica: Of one replica group only.
            rank: Of one rank of each group only.
            generation: Of one generation only.
            setup: The output of ``setup`` instead.
            tail: Of each process the last lines only.
            follow: Go on until the run ends.

        Raises:
            ConfigError: A number is negative.
            ChannelTimeoutError: The controller did not answer in time.
        """
        selection = Selection(replica=replica, rank=rank, generation=generation, setup=setup)
        cursor = _api.LogCursor(selection, tail)
        patience = _api.Patience(self._folder, follow=follow)
        while self._folder.phase() is Phase.LIVE or (follow and self._folder.phase() is Phase.LAUNCHING):
            try:
                cursor.rewind()
                for line in self._stream("/v1/logs", cursor.query(follow=follow), follow=follow):
                    patience.reset()
                    if found := cursor.accept(line):
                        yield found
                if not follow:
                    return
                time.sleep(patience.delay_s())
            except _api.transient() as error:
                time.sleep(patience.delay_s(error))
        yield from cursor.rest(self._folder)

    def log_bytes(
        self,
        *,
        replica: int | None = None,
        rank: int | None = None,
        generation: int | None = None,
        setup: bool = False,
    ) -> Iterator[bytes]:
        """The exact bytes that one process (of one slot) has written so far, in chunks.

        Raises:
            ConfigError: More than one process is selected.
            ChannelError: The controller went away in between.
        """
        selection = Selection(replica=replica, rank=rank, generation=generation, setup=setup)
        selection.require_one_process()
        patience = _api.Patience(self._folder)
        sent = 0
        while self._folder.phase() is Phase.LIVE:
            try:
                _api.reach(self._folder)
                with self._http().stream("GET", "/v1/logs/raw", params=selection.query()) as response:
                    if response.status_code != 200:
                        raise _api.failure(self._folder, response.status_code, response.read())
                    skip = sent
                    for chunk in response.iter_raw():
                        if fresh := chunk[skip:]:
                            sent += len(fresh)
                            yield fresh
                        skip = max(0, skip - len(chunk))
                return
            except _api.transient() as error:
                time.sleep(patience.delay_s(error))
        yield from _archive.skip_bytes(_archive.log_bytes(self._folder, selection), sent)

    def output_tar(self, max_bytes: int, *, limit_s: float) -> Iterator[bytes]:
        """The newest of what ranks printed, from the controller: a tar file in pieces.

        Raises:
            ChannelError: It does not answer, or is too slow.
        """
        deadline = time.monotonic() + limit_s
        _api.reach(self._folder)
        query = {"max_bytes": str(max_bytes)}
        try:
            with self._http().stream("GET", "/v1/logs/archive", params=query) as response:
                if response.status_code != 200:
                    raise _api.failure(self._folder, response.status_code, response.read())
                for piece in response.iter_raw():
                    yield piece
                    if time.monotonic() > deadline:
                        raise ChannelTimeoutError(f"it did not come within {limit_s:.0f} s")
        except _api.transient() as error:
            raise ChannelTimeoutError(f"the controller does not answer: {error}") from error

    def _stream(self, path: str, query: dict[str, str], *, follow: bool) -> Iterator[str]:
        timeout = _api.timeout(path, follow=follow)
        _api.reach(self._folder)
        with self._http().stream("GET", path, params=query, timeout=timeout) as response:
            if response.status_code != 200:
                raise _api.failure(self._folder, response.status_code, response.read())
            yield from response.iter_lines()

    def scale(
        self, replicas: int, *, dry_run: bool = False, reason: str = "scale", patience_s: float = 20.0
    ) -> Scaled:
        """Have another number of replica groups: those with the lowest numbers. Safe to repeat.

        New ones get their state from those that train; hosts are asked for where they need some. Those that leave
        finish their step; hosts that nothing is left on are taken down. Returns once the order is noted.

        Args:
            replicas: How many.
            dry_run: Say what would change, and change nothing.
            reason: Shown in the events.
            patience_s: Longest wait for a controller that is being restarted.

        Raises:
            ConfigError: It cannot be: too few, no room for so many, or the run is ending. Nothing was changed.
            ChannelTimeoutError: The controller did not answer in time. It may have heard.
        """
        body = scale_body(replicas, dry_run=dry_run, reason=reason)
        patience = _api.Patience(self._folder, limit_s=patience_s)
        while True:
            require_live(self._folder)
            try:
                response = self._http().post("/v1/scale", json=body)
                if response.status_code not in (200, 202):
                    raise _api.failure(self._folder, response.status_code, response.content)
                return Scaled.from_json(response.json())
            except _api.transient() as error:
                time.sleep(patience.delay_s(error))

    def may_bill(self) -> tuple[str, ...]:
        """Clusters of a run that has ended, or was lost, of which nobody has seen the end."""
        if self._folder.provider != "skypilot" or self._folder.phase() in (Phase.LIVE, Phase.LAUNCHING):
            return ()
        known = {host.host: host for host in self.status().hosts}
        every = dict.fromkeys((*self.hosts, *known))  # those included that it was scaled to
        left = [host for host in every if host not in known or known[host].phase != "DOWN"]
        asked = self._folder.clusters()
        head = self._folder.head
        # Of a host that counts as down there may be a cluster all the same: an older attempt's, or one that came late.
        # The record of the head outlives it.
        names = [cluster for host, cluster, stands in asked if host in left or (stands and host != head)]
        recorded = {host for host, *_ in asked}
        names += [
            cluster_name(host, known[host].attempt if host in known else 1)
            for host in left
            if host not in recorded
        ]
        if head and (head not in known or known[head].phase != "DOWN"):
            names.append(next((cluster for host, cluster, _ in asked if host == head), head))
        return tuple(sorted(dict.fromkeys(names)))

    def down(
        self,
        *,
        grace_s: float = 10.0,
        reason: str = "down",
        purge: bool = False,
        told: Callable[[RunStatus], None] | None = None,
    ) -> RunStatus:
        """End the run in order; where nobody is left to do so, from outside. Safe to repeat, in any phase.

        Its hosts are taken down, and waited for: who returns from here pays for none of them. A lost run is taken up
        again for that, without its ranks.

        Args:
            grace_s: Seconds between TERM and KILL.
            reason: Shown in the events.
            purge: Forget the hosts: end what is here and ask nobody. :meth:`may_bill` names what is left.
            told: Called about once a second, while hosts are waited for.

        Raises:
            SystemCallError: Some process could not be ended.
        """
        from sky_monarch.launch import local

        state, code, why = "CANCELLED", 8, reason
        if self._folder.phase() is Phase.LOST:
            lost = "its agent died" if self._folder.agent() is None else "its folder was removed"
            state, code, why = "FAILED", 1, f"{lost}; what was left was ended by down"
        if self._folder.head is not None and not purge and (self._folder.resumable or self.over):
            return self._end_away(grace_s, reason, told)
        if purge:
            why = f"{reason} --purge: its hosts were not waited for"
        elif self.hosts:
            self._end_with_hosts(grace_s, reason, told)
        elif self._folder.phase() is Phase.LIVE and self._ask_down(grace_s, reason):
            self._await_end(grace_s + _DOWN_MARGIN_S)
        left = local.reap(self._folder, grace_s=grace_s)
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            raise SystemCallError(f"these processes of {self.run_id} could not be ended: {pids}")
        final = local.finish(self._folder, state=state, reason=why, exit_code=code)
        return _archive.final_status(self._folder, final)

    def _need_server(self) -> None:
        """Have SkyPilot's API server, where a launcher is about to be started: it starts none itself."""
        folder = self._folder
        if folder.provider == "skypilot" and folder.phase() is not Phase.ENDED and folder.agent() is None:
            from sky_monarch.launch import skypilot

            skypilot.ensure_server()

    def _end_away(self, grace_s: float, reason: str, told: Callable[[RunStatus], None] | None) -> RunStatus:
        """Have the launcher end the run, its hosts and last of all its head."""
        from sky_monarch.launch import away, local

        self._need_server()

        def tell() -> None:
            with contextlib.suppress(SkyMonarchError):
                if told is not None and self._folder.phase() is Phase.LIVE:
                    told(self.status(patience_s=1.0))

        limit_s = grace_s + _AWAY_MARGIN_S
        if not away.end(self._folder, reason=reason, grace_s=grace_s, limit_s=limit_s, told=tell):
            raise ChannelTimeoutError(
                f"{self.run_id} has not ended within {limit_s:.0f} s; its launcher goes on trying",
                hint=f"its log is {self._folder.path / 'provisioner.log'}; `sky-monarch down --purge {self.name}` "
                "ends what is here, and says what may still bill",
            )
        if left := local.reap(self._folder, grace_s=grace_s):
            pids = ", ".join(str(process.pid) for process in left)
            raise SystemCallError(f"these processes of {self.run_id} could not be ended: {pids}")
        self._folder.settle()
        return self.status()

    def _end_with_hosts(self, grace_s: float, reason: str, told: Callable[[RunStatus], None] | None) -> None:
        """Have the run's own controller take its hosts down: nobody else knows which of them there are."""
        from sky_monarch.launch import local

        for _ in range(2):
            if self._folder.phase() is Phase.LOST:
                try:
                    local.resume(self._folder, ready=lambda _: self.answers())
                except LaunchError:
                    return
            if self._folder.phase() is not Phase.LIVE:
                return
            if self._ask_down(grace_s, reason):
                self._await_end(
                    grace_s + _HOSTS_MARGIN_S, told, again=lambda: self._ask_down(grace_s, reason)
                )
                return
            # It does not answer: a new one will, with the same journal.
            local.reap(self._folder, grace_s=grace_s)

    def _ask_down(self, grace_s: float, reason: str) -> bool:
        """Whether the controller took the order."""
        patience = _api.Patience(self._folder, limit_s=6.0)
        while self._folder.phase() is Phase.LIVE:
            try:
                body = {"grace_s": grace_s, "reason": reason}
                # One that is stopped or wedged is not waited for long: the run is then ended from outside.
                response = self._http().post("/v1/down", json=body, timeout=_ORDER_S)
                return response.status_code in (200, 202)
            except _api.transient() as error:
                try:
                    time.sleep(patience.delay_s(error))
                except SkyMonarchError:
                    return False
        return False

    def _await_end(
        self,
        limit_s: float,
        told: Callable[[RunStatus], None] | None = None,
        *,
        again: Callable[[], object] | None = None,
    ) -> None:
        start = time.monotonic()
        tell_s, ask_s = start + _TELL_EVERY_S, start + _ASK_EVERY_S
        while self._folder.agent() is not None and time.monotonic() - start < limit_s:
            if again is not None and time.monotonic() > ask_s:
                # A controller that could not write the order down, for want of room, loses it when it dies.
                again()
                ask_s = time.monotonic() + _ASK_EVERY_S
            if told is not None and time.monotonic() > tell_s:
                tell_s = time.monotonic() + _TELL_EVERY_S
                with contextlib.suppress(SkyMonarchError):
                    told(self.status(patience_s=1.0))
            time.sleep(_POLL_S)
