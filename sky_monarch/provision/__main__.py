"""``python -m sky_monarch.provision CONFIG.json``: the provisioner, a service of the head's agent.

Where the head is a cluster, it is the launcher: a process on its own, which keeps itself (``sky_monarch.keeper``).
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import structlog

from sky_monarch.errors import ConfigError
from sky_monarch.keeper import DEFECT, keep
from sky_monarch.provision.launcher import Launcher
from sky_monarch.provision.provider import Provider
from sky_monarch.provision.provisioner import Provisioner
from sky_monarch.provision.requests import Requests
from sky_monarch.provision.settings import Settings, load_settings
from sky_monarch.service_log import configure_log

_log = structlog.get_logger()


def main(argv: list[str]) -> int:
    """Provision until SIGTERM, or, as the launcher of a run, until that has ended.

    Returns:
        0, 2 for a configuration that cannot be used, 70 for a defect.
    """
    os.dup2(2, 1)  # what SkyPilot prints is for the log
    configure_log()
    if len(argv) != 2:
        _log.error("usage", expected="python -m sky_monarch.provision CONFIG.json")
        return 2
    try:
        settings = load_settings(Path(argv[1]))
    except ConfigError as error:
        _log.error("cannot start", error=str(error), hint=error.hint)
        return 2
    if settings.head is None:
        return _work(settings)
    if not _only_one(settings.run_dir / "provisioner.lock"):
        _log.error("cannot start", error="another launcher of this run lives")
        return 2
    return keep(lambda: _work(settings), lambda: None)  # the hosts that it started here live on


def _only_one(path: Path) -> bool:
    """Whether this is the only launcher of its run; it stays so until this process and its child have ended."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return False
    return True


def _work(settings: Settings) -> int:
    closing = threading.Event()

    def told(number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            closing.set()

    # A notice that this machine is about to be taken away is for its agent: SIGUSR1 ends nothing here. (Ignored
    # outright, these signals would be so in the hosts, too.)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, told)
    requests = Requests(settings.run_dir / "requests.json")
    provider = _provider(settings, requests, closing)
    worker: Provisioner | Launcher
    if settings.head is None:
        worker = Provisioner(settings, provider, requests, closing)
    else:
        worker = Launcher(settings, settings.head, provider, requests, closing)
    # Not this thread: a signal would wait for the answer to its question.
    thread = threading.Thread(target=worker.run, name="provisioner", daemon=True)
    thread.start()
    _log.info("provisioner runs", pid=os.getpid())
    closing.wait()
    worker.finish()
    return DEFECT if worker.failed else 0


def _provider(settings: Settings, requests: Requests, closing: threading.Event) -> Provider:
    if settings.provider == "local":
        from sky_monarch.provision.local import LocalProvider

        return LocalProvider(settings.run_id, settings.run_dir, workdir=settings.workdir)
    _act_as_the_shell(settings.shell_env)
    from sky_monarch.provision.skypilot import SkyPilotProvider

    return SkyPilotProvider(requests, settings, closing=closing)


def _act_as_the_shell(shell_env: Mapping[str, str]) -> None:
    """Have the environment of whoever typed `up`: where its API server is, and who we are for it.

    Services of an agent are started without what a shell exports, tokens among it. Of all of them only this one is
    there to use those.
    """
    for name, value in shell_env.items():
        if not name.startswith("SKY_MONARCH_"):
            os.environ.setdefault(name, value)


if __name__ == "__main__":
    code = main(sys.argv)
    sys.stderr.flush()
    os._exit(code)  # threads may be in the middle of a question to a provider: nobody waits for the answer
