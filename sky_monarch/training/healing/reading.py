"""How a joiner reads: as much as comes before the others wait for it, or all of it, from whoever has it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sky_monarch.actors.device_memory import Fence
from sky_monarch.actors.rdma import Domain, Transfer
from sky_monarch.errors import ChannelTimeoutError, SkyMonarchError
from sky_monarch.training.healing.arrival import Arrival, Batch
from sky_monarch.training.healing.donors import Donors
from sky_monarch.training.healing.offer import Donor, Manifest, memory_of_leaves

__all__ = ["ARRIVED", "OthersWaiting", "Tally", "read_state"]

logger = logging.getLogger(__name__)

ARRIVED = "arrived"
"""What a donor announces once it has computed its gradients."""

# How long a question stands whether the others wait.
_ASK_S = 0.25


class OthersWaiting:
    """Whether the others wait for this process: asked in a thread, for as long as it is entered.

    Args:
        domain: Of this process.
        address: The donor's.
        serial: Of its announcements in this step.
    """

    def __init__(self, domain: Domain, address: str, serial: int) -> None:
        self._domain, self._address, self._serial = domain, address, serial
        self._arrived, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._ask, name="others-arrive", daemon=True)

    def __bool__(self) -> bool:
        """True from when the donor has said so, or nothing can be heard of it."""
        return self._arrived.is_set()

    def _ask(self) -> None:
        while not self._over.is_set():
            try:
                self._domain.lookup(self._address, ARRIVED, self._serial, timeout_s=_ASK_S)
            except ChannelTimeoutError:
                continue
            except SkyMonarchError as error:
                logger.debug("the donor does not say whether the others wait: %s", error)
            self._arrived.set()
            return

    def __enter__(self) -> OthersWaiting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Not waited for here, where the others wait: the question ends by itself.
        self._over.set()

    def join(self) -> None:
        """Wait for the question under way: a thread that comes back from it while Python ends aborts the process."""
        self._over.set()
        self._thread.join(4 * _ASK_S)


@dataclass(slots=True)
class Tally:
    """What came in one step.

    Attributes:
        bytes: All of it.
        kept: Of them, those that were there already.
        again: Pieces that had to be read again.
        parts: What each donor gave, and why it was asked for nothing more, by its handle.
    """

    bytes: int = 0
    kept: int = 0
    again: int = 0
    parts: dict[str, Part] = field(default_factory=dict)

    def add(self, transfer: Transfer, owners: Sequence[str]) -> None:
        """Another transfer from ``owners``."""
        self.bytes += transfer.bytes
        self.kept += transfer.kept
        self.again += transfer.again
        for handle, gave in zip(owners, transfer.owners, strict=True):
            part = self.parts.setdefault(handle, Part())
            part.bytes += gave["bytes"]
            part.path = gave["path"] or part.path
            part.lost = gave["lost"] or part.lost

    def of(self, donor: Donor) -> Part:
        """What ``donor`` gave."""
        return self.parts.get(donor.handle, Part())

    def lost(self, handle: str) -> bool:
        """Whether it is of no use to ask there again."""
        return handle in self.parts and self.parts[handle].lost is not None


@dataclass(slots=True)
class Part:
    """What one donor gave in a step.

    Attributes:
        bytes: So much.
        path: How it came; None where nothing did.
        lost: Why it was asked for nothing more; None where it was.
    """

    bytes: int = 0
    path: str | None = None
    lost: str | None = None


def read_state(
    domain: Domain,
    arrival: Arrival,
    manifest: Manifest,
    donors: Donors,
    others: OthersWaiting,
    left_s: Callable[[], float],
    fence: Fence,
) -> Tally | None:
    """Read what has not come yet.

    Args:
        domain: Of this process.
        arrival: What has come so far.
        manifest: Of the assigned donor.
        donors: Who has what all have alike.
        others: Whether they wait.
        left_s: Seconds until the end of it.
        fence: When devices are through with what is written to.

    Returns:
        What the donors gave in this step; None where the others wait and something is still missing.

    Raises:
        TransferError: Nobody was left who gave it whole.
        ChannelError: The donor is gone, or took too long.
    """
    own = [] if manifest.own is None else [manifest.own]
    # What came in this step alone needs no second look.
    digest = arrival.held or arrival.steps == 1
    tally = Tally()

    def from_all() -> list[str]:
        """Whoever was found by now, and has not been lost in this step; all again where nobody else is left."""
        handles = [donor.handle for donor in donors.found]
        return [handle for handle in handles if not tally.lost(handle)] or handles

    def from_assigned() -> list[str]:
        return own

    def read(whom: Callable[[], list[str]], batch: Batch, *, digest: bool = True, keep: bool = False) -> None:
        for offset, tensors in batch.ranges:
            owners, into = whom(), memory_of_leaves(tensors, fence)
            transfer = domain.read_into(
                owners, into, timeout_s=left_s(), offset=offset, digest=digest, keep=keep
            )
            arrival.moved += transfer.bytes - transfer.kept
            tally.add(transfer, owners)

    parts = [(from_all, arrival.common)] if donors.found else []
    parts += [(from_assigned, arrival.own)] if own else []
    try:
        if arrival.held:
            for whom, tensors in parts:
                read(whom, Batch((), [(0, tensors)]))
            return tally
        least = arrival.moved + arrival.least_bytes
        if (rest := arrival.rest()) is not None:
            read(from_all, rest, digest=digest)
        batches: Iterable[tuple[Callable[[], list[str]], Iterable[Batch]]]
        batches = ((from_all, arrival.missing()), (from_assigned, arrival.own_missing()))
        for whom, some in batches:
            for batch in some:
                if others and arrival.moved >= least:
                    return None
                read(whom, batch, digest=digest)
                arrival.came(batch)
        if not digest:
            # Here others wait: for a comparison, and for what differs.
            for whom, tensors in parts:
                read(whom, Batch((), [(0, tensors)]), keep=True)
        return tally
    finally:
        for donor in donors.found:
            arrival.gave[donor.replica] = arrival.gave.get(donor.replica, 0) + tally.of(donor).bytes
