"""The SDK for asyncio programs: the same names, awaited."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Self

from sky_monarch.errors import ChannelTimeoutError
from sky_monarch.launch.folder import Phase, RunFolder, find
from sky_monarch.sdk import _api, _archive
from sky_monarch.sdk._archive import Selection
from sky_monarch.sdk._http import load_httpx
from sky_monarch.sdk.run import Run
from sky_monarch.sdk.scaling import Scaled, require_live, scale_body
from sky_monarch.sdk.types import Event, LogLine, RunStatus

if TYPE_CHECKING:
    import httpx

    from sky_monarch.sdk import _up

__all__ = ["AsyncRun", "attach", "down", "events", "logs", "scale", "status", "up"]

_POLL_S = 0.1


class AsyncRun(AbstractAsyncContextManager["AsyncRun"]):
    """A handle on one run, as :class:`sky_monarch.sdk.Run`, for asyncio.

    Args:
        folder: Where the run lives on disk.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._client: httpx.AsyncClient | None = None

    def __repr__(self) -> str:
        return f"AsyncRun({self.run_id!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def run_id(self) -> str:
        """Its id."""
        return self._folder.run_id

    @property
    def name(self) -> str:
        """Its name."""
        return self._folder.name

    async def aclose(self) -> None:
        """Close the connection; the run goes on."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def _http(self) -> httpx.AsyncClient:
        httpx = load_httpx()
        if self._client is None:
            self._client = httpx.AsyncClient(
                # A unix socket: no certificates are loaded, which would take most of a status's time.
                transport=httpx.AsyncHTTPTransport(uds=str(self._folder.api), verify=False, trust_env=False),
                base_url=_api.BASE_URL,
                headers=_api.headers(self._folder),
                timeout=_api.timeout(),
            )
        return self._client

    async def _reach(self) -> None:
        if self._folder.head is not None:
            await asyncio.to_thread(_api.reach, self._folder)

    def _streams(self, *, follow: bool) -> bool:
        phase = self._folder.phase()
        return phase is Phase.LIVE or (follow and phase is Phase.LAUNCHING)

    async def status(self, *, patience_s: float = 20.0) -> RunStatus:
        """What the run is doing now, or how it ended; see :meth:`Run.status`.

        Raises:
            ChannelTimeoutError: The controller did not answer in time.
        """
        patience = _api.Patience(self._folder, limit_s=patience_s)
        while True:
            if (known := _archive.status(self._folder)) is not None:
                return known
            try:
                await self._reach()
                response = await self._http().get("/v1/status", timeout=_api.timeout(patience_s=patience_s))
                if response.status_code != 200:
                    raise _api.failure(self._folder, response.status_code, response.content)
                return _api.status_of(self._folder, response.content)
            except _api.transient() as error:
                await asyncio.sleep(patience.delay_s(error))

    async def wait(self, *, timeout_s: float | None = None) -> RunStatus:
        """Wait for the end of the run; see :meth:`Run.wait`.

        Raises:
            ChannelTimeoutError: It was still going on after ``timeout_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._streams(follow=True):
            if deadline is not None and time.monotonic() > deadline:
                raise ChannelTimeoutError(f"{self.run_id} was still going on after {timeout_s:g} s")
            await asyncio.sleep(_POLL_S)
        return await asyncio.to_thread(Run(self._folder).wait)

    async def events(self, *, after: int = 0, follow: bool = False) -> AsyncIterator[Event]:
        """What happened, oldest first; see :meth:`Run.events`.

        Raises:
            ChannelTimeoutError: The controller did not answer in time.
        """
        cursor = _api.EventCursor(after)
        patience = _api.Patience(self._folder, follow=follow)
        if self._folder.head is not None:  # one that is lost has told what its successor does not know
            for kept in _archive.events(self._folder, after=after):
                if event := cursor.pass_on(kept):
                    yield event
        while self._streams(follow=follow):
            try:
                async for line in self._stream("/v1/events", cursor.query(follow=follow), follow=follow):
                    patience.reset()
                    if event := cursor.accept(line):
                        yield event
                if not follow:
                    return
                await asyncio.sleep(patience.delay_s())
            except _api.transient() as error:
                await asyncio.sleep(patience.delay_s(error))
        for event in _archive.events(self._folder, after=cursor.after):
            yield event

    async def logs(
        self,
        *,
        replica: int | None = None,
        rank: int | None = None,
        generation: int | None = None,
        setup: bool = False,
        tail: int | None = None,
        follow: bool = False,
    ) -> AsyncIterator[LogLine]:
        """Captured output, line by line; see :meth:`Run.logs`.

        Raises:
            ConfigError: A number is negative.
            ChannelTimeoutError: The controller did not answer in time.
        """
        selection = Selection(replica=replica, rank=rank, generation=generation, setup=setup)
        cursor = _api.LogCursor(selection, tail)
        patience = _api.Patience(self._folder, follow=follow)
        while self._streams(follow=follow):
            try:
                cursor.rewind()
                async for line in self._stream("/v1/logs", cursor.query(follow=follow), follow=follow):
                    patience.reset()
                    if found := cursor.accept(line):
                        yield found
                if not follow:
                    return
                await asyncio.sleep(patience.delay_s())
            except _api.transient() as error:
                await asyncio.sleep(patience.delay_s(error))
        for known in cursor.rest(self._folder):
            yield known

    async def _stream(self, path: str, query: dict[str, str], *, follow: bool) -> AsyncIterator[str]:
        timeout = _api.timeout(path, follow=follow)
        await self._reach()
        async with self._http().stream("GET", path, params=query, timeout=timeout) as response:
            if response.status_code != 200:
                raise _api.failure(self._folder, response.status_code, await response.aread())
            async for line in response.aiter_lines():
                yield line

    async def scale(
        self, replicas: int, *, dry_run: bool = False, reason: str = "scale", patience_s: float = 20.0
    ) -> Scaled:
        """Have another number of replica groups; see :meth:`Run.scale`.

        Raises:
            ConfigError: It cannot be. Nothing was changed.
            ChannelTimeoutError: The controller did not answer in time. It may have heard.
        """
        body = scale_body(replicas, dry_run=dry_run, reason=reason)
        patience = _api.Patience(self._folder, limit_s=patience_s)
        while True:
            require_live(self._folder)
            try:
                response = await self._http().post("/v1/scale", json=body)
                if response.status_code not in (200, 202):
                    raise _api.failure(self._folder, response.status_code, response.content)
                return Scaled.from_json(response.json())
            except _api.transient() as error:
                await asyncio.sleep(patience.delay_s(error))

    async def down(self, *, grace_s: float = 10.0, reason: str = "down", purge: bool = False) -> RunStatus:
        """End the run in order; see :meth:`Run.down`.

        Raises:
            SystemCallError: Some process could not be ended.
        """
        with Run(self._folder) as run:
            work = functools.partial(run.down, grace_s=grace_s, reason=reason, purge=purge)
            return await asyncio.to_thread(work)


async def up(
    job: _up.Job,
    *,
    name: str | None = None,
    env: Mapping[str, str | None] | None = None,
    secret: Mapping[str, str | None] | None = None,
    inject: Iterable[str] = (),
    hosts: int | None = None,
    head: str | None = None,
    head_address: str | None = None,
    spare: int | None = None,
    timeout_s: float = 60.0,
) -> AsyncRun:
    """Launch a job; see :func:`sky_monarch.sdk.up`.

    Raises:
        ConfigError: The job cannot be used; nothing was started.
        RunExistsError: A live run has its name.
        LaunchError: It did not come up; what had started was ended.
    """
    from sky_monarch.sdk import _up  # planning costs more to import than all the rest

    options: dict[str, Any] = {"name": name, "env": env, "secret": secret, "inject": inject}
    options |= {"hosts": hosts, "head": head, "address": head_address, "spare": spare}
    work = functools.partial(_up.launch_job, job, timeout_s=timeout_s, **options)
    with await asyncio.to_thread(work) as run:
        return AsyncRun(run.folder)


async def attach(name_or_id: str) -> AsyncRun:
    """The run of this name or id.

    Raises:
        RunNotFoundError: There is none.
    """
    return AsyncRun(find(name_or_id))


async def status(name_or_id: str) -> RunStatus:
    """What a run is doing now, or how it ended.

    Raises:
        RunNotFoundError: There is none.
        ChannelTimeoutError: The controller did not answer in time.
    """
    async with AsyncRun(find(name_or_id)) as run:
        return await run.status()


async def events(name_or_id: str, *, after: int = 0, follow: bool = False) -> AsyncIterator[Event]:
    """What happened in a run, oldest first; see :meth:`Run.events`.

    Raises:
        RunNotFoundError: There is none.
    """
    async with AsyncRun(find(name_or_id)) as run:
        async for event in run.events(after=after, follow=follow):
            yield event


async def logs(name_or_id: str, **selection: Any) -> AsyncIterator[LogLine]:
    """Captured output of a run; takes what :meth:`Run.logs` takes.

    Raises:
        RunNotFoundError: There is none.
    """
    async with AsyncRun(find(name_or_id)) as run:
        async for line in run.logs(**selection):
            yield line


async def scale(name_or_id: str, replicas: int, *, dry_run: bool = False, reason: str = "scale") -> Scaled:
    """Have another number of replica groups in a run; see :meth:`Run.scale`.

    Raises:
        RunNotFoundError: There is none.
        ConfigError: It cannot be. Nothing was changed.
        ChannelTimeoutError: The controller did not answer in time. It may have heard.
    """
    async with AsyncRun(find(name_or_id)) as run:
        return await run.scale(replicas, dry_run=dry_run, reason=reason)


async def down(
    name_or_id: str, *, grace_s: float = 10.0, reason: str = "down", purge: bool = False
) -> RunStatus:
    """End a run; see :meth:`Run.down`.

    Raises:
        RunNotFoundError: There is none.
        SystemCallError: Some process could not be ended.
    """
    return await AsyncRun(find(name_or_id)).down(grace_s=grace_s, reason=reason, purge=purge)
