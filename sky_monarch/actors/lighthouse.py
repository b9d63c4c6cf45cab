"""A lighthouse of the program's own, for replica groups that are actors: our Rust one, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from sky_monarch.actors.lighthouse_control import LighthouseControl
from sky_monarch.errors import ChannelError, ConfigError, LaunchError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Lighthouse"]

# Its stdin is a pipe that nobody writes to: it ends when the program ends, however that does, and then so does this.
_BOOT = """
import os, shutil, sys, threading
sys.path[:0] = [{home!r}]
def end():
    sys.stdin.buffer.read()
    shutil.rmtree({folder!r}, ignore_errors=True)
    os._exit(0)
threading.Thread(target=end, daemon=True).start()
from sky_monarch.lighthouse import main
sys.exit(main([{folder!r} + "/lighthouse.json"]))
"""
_RUN = "actors"
_END_S = 5.0
_EVICT_S = 10.0


class Lighthouse:
    """Where replica groups meet; ends with :meth:`close`, or with the program.

    Args:
        min_replicas: Never a quorum of fewer groups.
        expect: Groups that the first quorum waits for; by default ``min_replicas``.
        join_timeout_s: Longest wait for those, seconds.
        heartbeat_timeout_s: Silence after which a group counts as gone where nobody says so, seconds.

    Raises:
        ConfigError: A number cannot be used.
        LaunchError: It could not be started.
    """

    def __init__(
        self,
        *,
        min_replicas: int = 1,
        expect: int | None = None,
        join_timeout_s: float = 60.0,
        heartbeat_timeout_s: float = 5.0,
    ) -> None:
        if min_replicas < 1 or (expect is not None and expect < min_replicas):
            raise ConfigError(
                f"min_replicas is {min_replicas}, expect {expect}", hint="1 or more, and expect not below it"
            )
        if not (join_timeout_s > 0 and heartbeat_timeout_s > 0):
            raise ConfigError("join_timeout_s and heartbeat_timeout_s are above 0")
        self.min_replicas = min_replicas
        self._token = os.urandom(16).hex()
        self._folder = tempfile.mkdtemp(prefix="sky-monarch-")
        try:
            self._process = self._start(
                {
                    "run_id": _RUN,
                    "kind": "sky-monarch",
                    "private": f"{self._folder}/private.json",
                    "control": f"unix:{self._folder}/control",
                    "min_replicas": min_replicas,
                    "expect": expect or min_replicas,
                    "join_timeout_s": join_timeout_s,
                    "heartbeat_timeout_s": heartbeat_timeout_s,
                }
            )
            self._control = LighthouseControl(f"unix:{self._folder}/control", token=self._token, run_id=_RUN)
            self._control.state(timeout_s=_EVICT_S)  # it is there, or says why not
        except ChannelError as error:
            self.close()
            raise LaunchError(f"the lighthouse did not start: {error}") from error
        except BaseException:
            self.close()
            raise

    _process: subprocess.Popen[bytes] | None = None

    def _start(self, config: dict[str, object]) -> subprocess.Popen[bytes]:
        import sky_monarch

        home = os.path.dirname(os.path.dirname(os.path.abspath(sky_monarch.__file__)))  # noqa: PTH100, PTH120
        for name, content in (("private.json", {"token": self._token}), ("lighthouse.json", config)):
            with open(f"{self._folder}/{name}", "w", encoding="utf-8", opener=_private) as file:
                json.dump(content, file)
        # Bound here, before anybody is told of the port.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port = int(listener.getsockname()[1])
            return subprocess.Popen(
                [sys.executable, "-c", _BOOT.format(home=home, folder=self._folder)],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env={"RUST_LOG": "warn", **os.environ, "SKY_MONARCH_LISTEN_FD": str(listener.fileno())},
                start_new_session=True,
            )

    def address(self, replica: int, generation: int) -> str:
        """``TORCHFT_LIGHTHOUSE`` of one generation of a group. Holds the secret of this lighthouse."""
        return f"http://r{replica}.g{generation}.{self._token}@127.0.0.1:{self._port}"

    def evict(self, replica: int, generation: int) -> None:
        """A group has ended, up to that generation: nobody waits for it any more.

        Raises:
            ChannelTimeoutError: The lighthouse does not answer.
        """
        self._control.evict(replica, generation, timeout_s=_EVICT_S)

    def close(self) -> None:
        """End it. Does nothing the second time."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            assert process.stdin is not None  # noqa: S101  (a pipe, see above)
            process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
