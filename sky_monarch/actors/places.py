"""Places for what ran on hosts that are lost: the program decides which host has the place of which."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from sky_monarch.actors import serial
from sky_monarch.actors.future import FAILED, VALUE
from sky_monarch.actors.remote_error import RemoteError
from sky_monarch.errors import ConfigError, LaunchError, NoCapacityError, SkyMonarchError

if TYPE_CHECKING:
    from sky_monarch._core import ActorRequest
    from sky_monarch.actors.attach import Door
    from sky_monarch.actors.far_host import FarHost

__all__ = ["Places"]

#: A host that does not say how many processes run there is passed over.
_LOAD_S = 5.0
#: A host that is on its way is looked for so often, besides being heard of.
_LOOK_S = 0.5


class Places:
    """One a program. A lost host's place is taken once, by one host, for all meshes that had processes there.

    Args:
        door: How this program is attached to hosts.
    """

    def __init__(self, door: Door) -> None:
        self._door = door
        self._attached = door.runtime.attached
        self._lock = threading.Lock()

    def find(self, folder: str, count: int, each: int, wanted: str | None, end: float) -> tuple[str, str]:
        """The host that has the place of a lost one; it is chosen now, where none has.

        Args:
            folder: Of the lost host.
            count: Processes that are to be started there.
            each: Processes that a host of their mesh has room for.
            wanted: Folder of the host that is to have it; None for any that has room: one that has come anew, then
                the attached one that runs the fewest processes.
            end: When to give up on a host that is on its way, by ``time.monotonic()``.

        Raises:
            ConfigError: Another one than ``wanted`` has it.
            LaunchError: ``wanted`` is lost.
            NoCapacityError: No host has room.
        """
        while True:
            with self._lock:
                lost = self._attached.hosts[folder]
                if lost.gone is None:
                    if wanted not in (None, lost.folder):
                        raise ConfigError(f"{lost.name} has the place of that host already")
                    return lost.folder, lost.name
                found = self._given(wanted) if wanted is not None else self._any(lost, count, each)
                if found is not None:
                    self._put(lost, found)
                    return found.folder, found.name
            if lost.name not in self._door.expected or time.monotonic() >= end:
                raise NoCapacityError(
                    f"no host has room for what ran on {lost.name}: {lost.gone}",
                    hint="respawn(…, host=…) names one, also one that is full; or attach another one",
                )
            with self._door.changed:
                self._door.changed.wait(max(0.0, min(_LOOK_S, end - time.monotonic())))

    def _given(self, wanted: str) -> FarHost:
        found = self._attached.hosts.get(wanted)
        if found is None:
            raise ConfigError(
                "that host is the program's own, or of another program", hint="give one that is attached"
            )
        found.check()
        return found

    def _any(self, lost: FarHost, count: int, each: int) -> FarHost | None:
        came = self._door.newcomer(lost.name) or self._door.dial_again(lost.folder)
        if came is not None:
            return came
        hosts = {id(host): host for host in self._attached.hosts.values() if host.gone is None}
        asked = [(host, host.ask("load")) for host in hosts.values()]
        loads: list[tuple[int, str, FarHost]] = []
        until = time.monotonic() + _LOAD_S
        for host, replies in asked:
            if replies.wait(max(0.0, until - time.monotonic())):
                for _, kind, body, buffers in replies.take():
                    if kind == VALUE:
                        loads.append((serial.loads(body, buffers), host.name, host))
        room = [load for load in loads if load[0] + count <= each]
        return min(room, key=lambda load: load[:2])[2] if room else None

    def _put(self, lost: FarHost, found: FarHost) -> None:
        self._attached.replace(lost, found)
        self._door.gateway.place(lost.folder, found.folder)

    def asked(self, request: ActorRequest, _: str, folder: str, name: str, *what: object) -> None:
        """An actor elsewhere has lost a host on which it had started processes."""
        threading.Thread(
            target=self._answer, args=(request, folder, name, *what), name="sky-monarch-place", daemon=True
        ).start()

    def _answer(
        self,
        request: ActorRequest,
        folder: str,
        name: str,
        count: int,
        each: int,
        wanted: str | None,
        limit_s: float,
    ) -> None:
        try:
            if self._attached.host(folder, name) is None:
                raise LaunchError(f"{name} is the program's own host")
            found = self.find(folder, count, each, wanted, time.monotonic() + limit_s)
        except SkyMonarchError as error:
            request.reply(FAILED, *serial.dumps(RemoteError.of(error)))
        else:
            request.reply(VALUE, *serial.dumps(found))
