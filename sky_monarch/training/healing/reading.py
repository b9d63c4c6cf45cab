"""How a joiner reads: as much as comes before the others wait for it, or all of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from sky_monarch.actors.rdma import Domain, Transfer
from sky_monarch.errors import ChannelTimeoutError, SkyMonarchError
from sky_monarch.training.healing.arrival import Arrival, Batch
from sky_monarch.training.healing.offer import Donor, Manifest, memory_of_leaves

__all__ = ["ARRIVED", "OthersWaiting", "read_state"]

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


def read_state(
    domain: Domain,
    arrival: Arrival,
    manifest: Manifest,
    donors: Sequence[Donor],
    others: OthersWaiting,
    left_s: Callable[[], float],
) -> Transfer | None:
    """Read what has not come yet.

    Args:
        domain: Of this process.
        arrival: What has come so far.
        manifest: Of the assigned donor.
        donors: Who has what all have alike; the assigned one first.
        others: Whether they wait.
        left_s: Seconds until the end of it.

    Returns:
        What the donors gave in this step; None where the others wait and something is still missing.

    Raises:
        TransferError: Nobody was left who gave it whole.
        ChannelError: The donor is gone, or took too long.
    """
    handles = [donor.handle for donor in donors]
    own = [] if manifest.own is None else [manifest.own]
    parts = ((handles, arrival.common), (own, arrival.own))
    # What came in this step alone needs no second look.
    digest = arrival.held or arrival.steps == 1
    tally = Transfer(
        bytes=0, kept=0, again=0, owners=[{"bytes": 0, "path": None, "lost": None} for _ in donors]
    )

    def read(owners: list[str], batch: Batch, *, digest: bool = True, keep: bool = False) -> None:
        nonlocal tally
        for offset, tensors in batch.ranges:
            into = memory_of_leaves(tensors)
            transfer = domain.read_into(
                owners, into, timeout_s=left_s(), offset=offset, digest=digest, keep=keep
            )
            arrival.moved += transfer.bytes - transfer.kept
            tally = _sum(tally, transfer, counts=owners is handles)

    if arrival.held:
        for owners, tensors in parts:
            if owners:
                read(owners, Batch((), [(0, tensors)]))
        return tally
    least = arrival.moved + arrival.least_bytes
    if (rest := arrival.rest()) is not None:
        read(handles, rest, digest=digest)
    batches: Iterable[tuple[list[str], Iterable[Batch]]]
    batches = ((handles, arrival.missing()), (own, arrival.own_missing()))
    for owners, some in batches:
        for batch in some:
            if others and arrival.moved >= least:
                return None
            read(owners, batch, digest=digest)
            arrival.came(batch)
    if not digest:
        # Here others wait: for a comparison, and for what differs.
        for owners, tensors in parts:
            if owners:
                read(owners, Batch((), [(0, tensors)]), keep=True)
    return tally


def _sum(tally: Transfer, transfer: Transfer, *, counts: bool) -> Transfer:
    owners = [
        {
            "bytes": old["bytes"] + new["bytes"],
            "path": new["path"] or old["path"],
            "lost": old["lost"] or new["lost"],
        }
        for old, new in zip(tally.owners, transfer.owners if counts else [], strict=False)
    ]
    return Transfer(
        bytes=tally.bytes + transfer.bytes,
        kept=tally.kept + transfer.kept,
        again=tally.again + transfer.again,
        owners=owners or tally.owners,
    )
