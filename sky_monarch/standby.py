"""Where a hot standby waits, with all of its script behind it that does not depend on who it will be.

Under ``recovery.standby_until: session`` a standby runs the job's script ahead of time. A
:class:`~sky_monarch.training.Session` waits here when it is entered; a script without one may say itself
where it has to wait::

    from sky_monarch.standby import wait_for_promotion

    model = build_model()
    wait_for_promotion()        # returns at once in a process that is not on standby
    generation = os.environ["SKY_MONARCH_GENERATION"]

Until then the process is nobody: its generation is 0, it has no lighthouse, and neither the agent nor the
lighthouse accepts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import sys

from sky_monarch import stacks
from sky_monarch.errors import ConfigError

__all__ = ["Promotion", "PromotionError", "wait_for_promotion"]

# A line of environment; the kernel's own limit for a whole environment is 2 MiB (ARG_MAX).
_MOST_BYTES = 4 * 1024 * 1024
_BAD_USAGE = 2


class PromotionError(Exception):
    """What arrived is no promotion."""


class Promotion:
    """The standby's end of its agent's line.

    Args:
        fd: A unix socket, or anything that can be read.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def announce(self, word: str = "ready") -> None:
        """Say ``word`` where the other end can hear it: that this process is ready, came early, or lacks a module."""
        if stat.S_ISSOCK(os.fstat(self.fd).st_mode):
            # Promoted before it was ready: the other end is closed, and the promotion waits to be read.
            with socket.socket(fileno=os.dup(self.fd)) as peer, contextlib.suppress(ConnectionError):
                # A module may have set a default timeout, and with it, that the next read does not wait.
                peer.settimeout(None)
                peer.sendall(f"{word}\n".encode(errors="replace"))

    def read(self) -> dict[str, str] | None:
        """Wait for the line that promotes this process; None when it is not needed.

        Raises:
            PromotionError: What arrived is no such line.
        """
        data = b""
        while not data.endswith(b"\n"):
            part = os.read(self.fd, 65536)
            if not part:
                if data:
                    raise PromotionError("the promotion ended in mid-line")
                return None
            data += part
            if len(data) > _MOST_BYTES:
                raise PromotionError(f"the promotion is longer than {_MOST_BYTES} bytes")
        try:
            env = json.loads(data)["env"]
            if not isinstance(env, dict) or not all(
                isinstance(text, str) for pair in env.items() for text in pair
            ):
                raise TypeError("env must map text to text")
        except (ValueError, KeyError, TypeError) as error:
            # Never its content: it holds secrets.
            raise PromotionError(f"the promotion is malformed: {error}") from error
        return env

    def accept(self, env: dict[str, str]) -> None:
        """Become the rank that ``env`` says; the line is closed."""
        os.close(self.fd)
        os.environ.update(env)
        with contextlib.suppress(ValueError):  # only the main thread may
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        stacks.register()


class _Hold:
    """What stands between this process and its promotion, while the script runs ahead."""

    def __init__(self, promotion: Promotion) -> None:
        self.promotion = promotion
        self.pid = os.getpid()


_hold: _Hold | None = None


def hold(promotion: Promotion) -> None:
    """From now on :func:`wait_for_promotion` waits; called by the worker alone, before the script runs."""
    global _hold  # there is one promotion a process
    os.set_inheritable(promotion.fd, False)
    _hold = _Hold(promotion)


def release() -> bool:
    """Hold nothing any more; whether something was held by this very process, and no child of it."""
    global _hold
    held, _hold = _hold, None
    return held is not None and held.pid == os.getpid()


def is_held() -> bool:
    """Whether this process is on standby, and has not come to the end of its wait."""
    return _hold is not None


def wait_for_promotion() -> bool:
    """On standby: wait until this process is needed, and let its environment become that of the rank.

    Returns:
        Whether there was something to wait for. False at once in every other process, and at the second call.

    Raises:
        ConfigError: This process was forked by one on standby; only that one can be promoted.
        SystemExit: Nobody needs this process (code 0), or what promoted it cannot be read (code 2).
    """
    if _hold is None:
        return False
    if _hold.pid != os.getpid():
        raise ConfigError(
            "a process that a standby has forked cannot become a rank",
            hint="start processes inside the session, or set recovery.standby_until: imports",
        )
    promotion = _hold.promotion
    sys.stdout.flush()
    sys.stderr.flush()  # what was said on standby belongs to the standby's log
    promotion.announce()
    try:
        env = promotion.read()
    except (PromotionError, OSError) as error:
        release()
        sys.stderr.write(f"error: worker: {error}\n")
        raise SystemExit(_BAD_USAGE) from None
    release()
    if env is None:
        raise SystemExit(0)
    promotion.accept(env)
    return True
