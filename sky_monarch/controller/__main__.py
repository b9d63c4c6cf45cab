"""``python -m sky_monarch.controller CONFIG.json``: the controller process, started by the head's agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from sky_monarch.actors.authority import Authority
from sky_monarch.actors.channel_server import ChannelServer
from sky_monarch.actors.lighthouse_control import LighthouseControl
from sky_monarch.controller.agents import Agents
from sky_monarch.controller.api import make_app
from sky_monarch.controller.controller import Controller
from sky_monarch.controller.enrolment import Issuer
from sky_monarch.controller.expectation import Expectation
from sky_monarch.controller.plans import Plans
from sky_monarch.controller.rebuild import open_journal
from sky_monarch.controller.settings import Settings, load_settings
from sky_monarch.errors import ConfigError, SkyMonarchError
from sky_monarch.service_log import configure_log

_log = structlog.get_logger()

_DRAIN_S = 2


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: when to stop is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(argv: list[str]) -> int:
    """Run a controller until its run ends or SIGTERM arrives.

    Returns:
        0, 2 for a configuration that cannot be used, 1 for all else.
    """
    configure_log()
    if len(argv) != 2:
        _log.error("usage", expected="python -m sky_monarch.controller CONFIG.json")
        return 2
    try:
        settings = load_settings(Path(argv[1]), os.environ)
        plans = Plans(settings)
        asyncio.run(_serve(settings, plans))
    except ConfigError as error:
        _log.error("cannot start", error=str(error), hint=error.hint)
        return 2
    except (SkyMonarchError, OSError) as error:
        _log.error("controller failed", error=str(error))
        return 1
    return 0


async def _serve(settings: Settings, plans: Plans) -> None:
    journal, lost = open_journal(settings.run_dir / "journal.db")
    channel = ChannelServer(
        settings.channel,
        settings.token,
        settings.run_id,
        identity=settings.identity,
        listener_fd=settings.listener_fd,
    )
    agents = Agents(channel, settings.hosts, ranks=plans.limits.ranks_per_replica)
    controller = Controller(
        settings,
        plans,
        journal,
        agents,
        lost=lost,
        issuer=_issuer(settings),
        expectation=_expectation(settings),
        room=plans.room(),
    )
    listener = _listen(settings.api)
    server = _Server(
        uvicorn.Config(
            make_app(controller, settings.token),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_DRAIN_S,
            backlog=128,
        )
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    controller.start()
    _log.info("controller runs", run_id=settings.run_id, pid=os.getpid(), state=controller.status()["state"])
    serving = loop.create_task(server.serve(sockets=[listener]))
    waits: list[asyncio.Future[Any]] = [
        serving,
        loop.create_task(stop.wait()),
        loop.create_task(controller.finished.wait()),
        controller.failure,
    ]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await asyncio.wait([serving], timeout=_DRAIN_S + 1)
        for wait in done:
            wait.result()  # crash-only: an error ends the process with its traceback
    finally:
        for wait in waits:
            wait.cancel()
        controller.close()
        listener.close()


def _issuer(settings: Settings) -> Issuer | None:
    """The authority of the run, where it has one."""
    if settings.authority is None:
        return None
    return Authority.from_json(settings.authority)


def _expectation(settings: Settings) -> Expectation | None:
    """Who tells the lighthouse of another number of groups; TorchFT's expects none."""
    if settings.lighthouse_supervised is None:
        return None
    line = LighthouseControl(settings.lighthouse_supervised, token=settings.token, run_id=settings.run_id)
    return Expectation(line.expect)


def _listen(path: Path) -> socket.socket:
    """Listen on ``path``, in place of what a dead controller left there; only the user may connect."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} exists and is no socket")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(128)
    listener.setblocking(False)
    return listener


if __name__ == "__main__":
    sys.exit(main(sys.argv))
