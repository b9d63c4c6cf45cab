"""Places for what ran on hosts that are lost: the program decides which host has the place of which."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from sky_monarch.actors import serial
from sky_monarch.actors.future import FAILED, VALUE
from sky_monarch.actors.remote_error import RemoteError
from sky_monarch.errors import ConfigError, LaunchError, NoCapacityError, SkyMonarchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sky_monarch._core import ActorRequest
    from sky_monarch.actors.attach import Door
    from sky_monarch.actors.far_host import FarHost

__all__ = ["Places"]

#: A host that does not say how many processes run there is passed over.
_LOAD_S = 5.0
#: A host that is on its way is looked for so often, besides being heard of.
_LOOK_S = 0.5
#: Within that a process that was given a place runs there, or never will.
_PROMISED_S = 60.0

#: Folder and name of a host.
Where = tuple[str, str]


class Places:
    """One a program. What ran on a lost host is spread over those that have room; one of them has the host's own place.

    A host that was named, or has come anew, has the whole place: all meshes that had processes there come back on it.

    Args:
        door: How this program is attached to hosts.
    """

    def __init__(self, door: Door) -> None:
        self._door = door
        self._attached = door.runtime.attached
        self._lock = threading.Lock()
        #: Folders of lost hosts whose place another one has as a whole.
        self._whole: set[str] = set()
        #: Processes that are not where the place of their host is, by address.
        self._apart: set[str] = set()
        #: Names of processes that have a place and may not run there yet, by folder of the host: until when they count.
        self._promised: dict[str, dict[str, float]] = {}

    def find(
        self, folder: str, addresses: Sequence[str], each: int, wanted: str | None, end: float
    ) -> tuple[Where, list[Where]]:
        """The places of processes whose host is lost; they are chosen now, where none has them.

        Args:
            folder: Of the lost host.
            addresses: Of the processes that are to be started again.
            each: Processes that a host of their mesh has room for.
            wanted: Folder of the host that is to have them; None for any that has room: one that has come anew, else
                the attached ones, each process on that which runs the fewest.
            end: When to give up on a host that is on its way, by ``time.monotonic()``.

        Returns:
            Folder and name of the host that has the place of the lost one, and of that of each process.

        Raises:
            ConfigError: Another one than ``wanted`` has the whole place.
            LaunchError: ``wanted`` is lost.
            NoCapacityError: The hosts have no room for all of them.
        """
        while True:
            with self._lock:
                lost = self._attached.hosts[folder]
                found = self._choose(folder, lost, addresses, each, wanted)
                if found is not None:
                    self._put(lost, addresses, found)
                    at = self._attached.hosts[folder]
                    return (at.folder, at.name), [(host.folder, host.name) for host in found]
            if lost.name not in self._door.expected or time.monotonic() >= end:
                raise NoCapacityError(
                    f"no host has room for what ran on {lost.name}: {lost.gone or 'it is lost'}",
                    hint="respawn(…, host=…) names one, also one that is full; or attach another one",
                )
            with self._door.changed:
                self._door.changed.wait(max(0.0, min(_LOOK_S, end - time.monotonic())))

    def _choose(
        self, folder: str, lost: FarHost, addresses: Sequence[str], each: int, wanted: str | None
    ) -> list[FarHost] | None:
        """A host for each process; None where there is not room for all of them."""
        if lost.gone is None and (lost.folder == folder or folder in self._whole):
            if wanted not in (None, lost.folder):
                raise ConfigError(f"{lost.name} has the place of that host already")
            return [lost] * len(addresses)
        one = self._given(wanted) if wanted is not None else self._anew(lost)
        found = [one] * len(addresses) if one is not None else self._spread(addresses, each)
        if lost.gone is not None and found is not None:
            there = {at for at, host in self._attached.hosts.items() if host is lost}
            self._whole = self._whole | there if one is not None else self._whole - there
        return found

    def _anew(self, lost: FarHost) -> FarHost | None:
        """A host that has come in place of the lost one."""
        if lost.gone is None:
            return None
        return self._door.newcomer(lost.name) or self._door.dial_again(lost.folder)

    def _given(self, wanted: str) -> FarHost:
        found = self._attached.hosts.get(wanted)
        if found is None:
            raise ConfigError(
                "that host is the program's own, or of another program", hint="give one that is attached"
            )
        found.check()
        return found

    def _spread(self, addresses: Sequence[str], each: int) -> list[FarHost] | None:
        loads = self._loads()
        found = []
        for _ in addresses:
            room = [load for load in loads if load[0] < each]
            if not room:
                return None
            least = min(room, key=lambda load: load[:2])
            loads[loads.index(least)] = (least[0] + 1, *least[1:])
            found.append(least[2])
        return found

    def _loads(self) -> list[tuple[int, str, FarHost]]:
        """How many processes run on each host, or are about to, with its name."""
        hosts = {id(host): host for host in self._attached.hosts.values() if host.gone is None}
        asked = [(host, host.ask("load")) for host in hosts.values()]
        loads: list[tuple[int, str, FarHost]] = []
        now = time.monotonic()
        for host, replies in asked:
            promised = self._promised.setdefault(host.folder, {})
            for name in [name for name, until in promised.items() if until < now]:
                del promised[name]
            if replies.wait(max(0.0, now + _LOAD_S - time.monotonic())):
                for _, kind, body, buffers in replies.take():
                    if kind == VALUE:
                        running = set(serial.loads(body, buffers))
                        loads.append((len(running | promised.keys()), host.name, host))
        return loads

    def _put(self, lost: FarHost, addresses: Sequence[str], found: list[FarHost]) -> None:
        if lost.gone is not None:
            self._attached.replace(lost, found[0])
            self._door.gateway.place(lost.folder, found[0].folder)
        until = time.monotonic() + _PROMISED_S
        for address, host in zip(addresses, found, strict=True):
            folder, name = os.path.split(address)
            if address in self._apart or self._attached.hosts.get(folder) is not host:
                self._apart.add(address)
                self._door.gateway.place(address, host.folder)
            self._promised.setdefault(host.folder, {})[name] = until

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
        addresses: list[str],
        each: int,
        wanted: str | None,
        limit_s: float,
    ) -> None:
        try:
            if self._attached.host(folder, name) is None:
                raise LaunchError(f"{name} is the program's own host")
            found = self.find(folder, addresses, each, wanted, time.monotonic() + limit_s)
        except SkyMonarchError as error:
            request.reply(FAILED, *serial.dumps(RemoteError.of(error)))
        else:
            request.reply(VALUE, *serial.dumps(found))
