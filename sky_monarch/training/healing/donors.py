"""Who gives a joiner its state: the assigned donor, and every other member that is at its step."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable
from typing import Protocol

from sky_monarch.actors.rdma import Domain
from sky_monarch.errors import ChannelTimeoutError, CheckpointError, SkyMonarchError
from sky_monarch.training.healing.offer import Donor, Manifest

__all__ = ["GIVES", "Donors", "Neighbours"]

logger = logging.getLogger(__name__)

GIVES = "gives"
"""What every member at the newest step announces in each step in which another one heals: its :class:`Donor`'s text."""

# How long a question stands whether a member gives something in this step.
_ASK_S = 0.25


class Neighbours(Protocol):
    """The members of the newest quorum."""

    def donors(self) -> list[str]:
        """What they said when they met."""


class Donors:
    """Donors of one step. Those that met at it are known at once; others are asked, in a thread, while it is entered.

    Args:
        domain: Of this process.
        manifest: Of the assigned donor: whoever is not at its step, or has another model, is no donor.
        replica: This replica group.
        serial: Of what is announced in this step.

    Attributes:
        found: By now, the assigned one first: it decides what is right. Only grows.
    """

    def __init__(self, domain: Domain, manifest: Manifest, replica: int, serial: int) -> None:
        self._domain, self._manifest, self._serial = domain, manifest, serial
        self._known = {replica, manifest.replica}
        self._over = threading.Event()
        self._asked: list[str] = []
        self._thread: threading.Thread | None = None
        self.found: list[Donor] = []
        if manifest.common is not None:
            self.found.append(
                Donor(
                    replica=manifest.replica,
                    step=manifest.step,
                    layout=manifest.layout,
                    handle=manifest.common,
                )
            )

    def met(self, neighbours: Neighbours) -> None:
        """Take what the members said when they met: some steps ago, where the quorum has lasted since."""
        if not self.found:
            return
        try:
            words = neighbours.donors()
        except Exception as error:  # noqa: BLE001  # the assigned one is enough
            logger.info("nobody but replica %d is asked for its state: %s", self._manifest.replica, error)
            return
        # Who was ahead when they met is so now, most likely: whoever else heals would be waited for in vain.
        for donor in sorted(_readable(words), key=lambda donor: -donor.step):
            if donor.replica in self._known:
                continue
            if donor.step == self._manifest.step:
                self._take(donor)
            elif (address := _address_of(donor)) is not None:
                self._asked.append(address)

    @property
    def addresses(self) -> list[str]:
        """Of all that give something, or are asked whether they do."""
        return [*filter(None, map(_address_of, self.found)), *self._asked]

    def _take(self, donor: Donor) -> None:
        fits = (donor.step, donor.layout) == (self._manifest.step, self._manifest.layout)
        if fits and donor.replica not in self._known:
            self._known.add(donor.replica)
            self.found.append(donor)

    def _ask(self) -> None:
        while self._asked and not self._over.is_set():
            for address in tuple(self._asked):
                if self._over.is_set():
                    return
                try:
                    word = self._domain.lookup(address, GIVES, self._serial, timeout_s=_ASK_S)
                except ChannelTimeoutError:
                    continue  # it may be on its way to this step
                except SkyMonarchError as error:
                    logger.debug("%s gives nothing in this step: %s", address, error)
                else:
                    for donor in _readable([word]):
                        self._take(donor)
                self._asked.remove(address)

    def __enter__(self) -> Donors:
        if self._asked:
            self._thread = threading.Thread(target=self._ask, name="find-donors", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Not waited for here, where the others wait: the question ends by itself.
        self._over.set()

    def join(self) -> None:
        """Wait for the question under way: a thread that comes back from it while Python ends aborts the process."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(4 * _ASK_S)


def _readable(words: Iterable[str]) -> list[Donor]:
    donors = []
    for word in words:
        try:
            donors.append(Donor.of_text(word))
        except CheckpointError as error:
            logger.warning("a member is not asked for its state: %s", error)
    return donors


def _address_of(donor: Donor) -> str | None:
    """Where the owner of its memory is asked; None where its handle is none."""
    try:
        return str(json.loads(donor.handle)["address"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
