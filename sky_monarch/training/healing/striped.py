"""The session's way to heal: TorchFT's transport interface over memory that is read directly.

When the members of a quorum meet, each registers the tensors that all of them have alike, and says so under the
quorum's own prefix of the rendezvous store. The one that TorchFT assigned to a joiner adds the rest of its state, as
JSON and tensors. The joiner reads pieces from all who are at the step, straight into its own parameters, and checks
each against the digest that the assigned one gives. Before its optimizer step every member withdraws what it
registered; what is then still being read does not count. A step that failed has changed nothing: who was reading goes
on, which is how a newcomer outlives the death of one of its donors.

A joiner that can keep up (:meth:`StripedTransport.keep_up`) lets nobody wait: when its donor says that the others have
computed their gradients, it takes part in the step with what has come by then, and reads on in the next one. For as
long as that lasts, every member at the newest step registers its tensors again in each step, and announces them
(:meth:`StripedTransport.give`). See :mod:`sky_monarch.training.healing.arrival`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torchft.checkpointing.transport import CheckpointTransport

from sky_monarch.actors.device_memory import Fence
from sky_monarch.actors.rdma import Domain, Memory, memory_of
from sky_monarch.errors import CheckpointError, SkyMonarchError
from sky_monarch.training.healing.arrival import Arrival, Following
from sky_monarch.training.healing.donors import GIVES, Donors, Neighbours
from sky_monarch.training.healing.encoding import Leaf, Replicated, Shape, decode, encode
from sky_monarch.training.healing.offer import Donor, Manifest, layout_of, memory_of_leaves
from sky_monarch.training.healing.reading import ARRIVED, OthersWaiting, Tally, read_state
from sky_monarch.training.sharding import MODEL
from sky_monarch.training.transport import Heal
from sky_monarch.training.tunnel import Tunnel

__all__ = ["Source", "StripedTransport"]

logger = logging.getLogger(__name__)

_SCHEME = "sky-rdma:"
_STATE = "state"
# An operation under way is a piece: milliseconds. A joiner that takes longer reads it elsewhere.
_WITHDRAW_S = 2.0
_MOST_MANIFEST_BYTES = 256 << 20
# Of a quorum, in numbers of announcements: more steps than one ever lasts.
_STEPS_A_QUORUM = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The state of this process.

    Attributes:
        parts: Functions that return a part each; called in another thread while a step computes.
        replicated: What of them all groups have alike.
        step: Steps committed.
        failed: Whether the step under way has failed: it will be voted against, and nothing changes.
    """

    parts: Mapping[str, Callable[[], Any]]
    replicated: Replicated
    step: Callable[[], int]
    failed: Callable[[], bool]

    def common(self) -> list[Leaf]:
        """The tensors that all groups have alike, in the same order on all of them."""
        leaves: list[Leaf] = []
        for key, save in self.parts.items():
            if key in self.replicated.keys:
                leaves += encode(save(), (key,))[1]
        return [
            leaf for leaf in leaves if self.replicated.covers(leaf.path) and Shape.of(leaf.tensor).is_dense
        ]


class StripedTransport(CheckpointTransport[Any]):  # type: ignore[misc]  # torchft has no type information
    """Gives this process's state to groups that heal, and gets theirs.

    Args:
        replica: This replica group.
        token: The run's secret: who cannot prove that it has it is told nothing.
        address: Numeric address that others reach.
        neighbours: Who else is there.
        bytes_per_s: What may leave in all; None for as much as there is.
        tunnel: The way to donors on other hosts, where these do not reach each other by themselves.
        device: Of the parameters; None for the host's memory.

    Attributes:
        torn: Whether this process's parameters are partly a donor's: they are of no step then.
        following: What this process has to do in a step that it takes part in while its state is still coming.
    """

    def __init__(
        self,
        *,
        replica: int,
        token: str,
        address: str,
        neighbours: Neighbours,
        bytes_per_s: int | None = None,
        tunnel: Tunnel | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._replica, self._neighbours, self._tunnel = replica, neighbours, tunnel
        self._device = device or torch.device("cpu")
        self._devices: set[torch.device] = set()  # of what there is to give
        self._fence = Fence()
        self._domain = Domain(token, address=address, bytes_per_s=bytes_per_s)
        self._source: Source | None = None
        self._lock = threading.Lock()
        self._offers: list[str] = []
        self._announced = False
        self._quorum = self._serial = -1
        self._common: list[Leaf] = []
        self._layout = ""
        self._common_handle: str | None = None
        self._registered: tuple[int, list[tuple[int, int]]] = (-1, [])
        self._heal: Heal | None = None
        self._names: Sequence[str] | None = None
        self._arrival: Arrival | None = None
        self._others: OthersWaiting | None = None
        self._donors: Donors | None = None
        self.torn = False
        self.following: Following | None = None

    def serve(self, source: Source) -> None:
        """What to give away from now on.

        Raises:
            CheckpointError: It holds something that cannot be handed over.
        """
        for key, save in source.parts.items():
            self._devices |= {leaf.tensor.device for leaf in encode(save(), (key,))[1]}
        self._source = source
        self.settle()

    def settle(self) -> None:
        """Say that this thread has queued all that changes the state until the next commit; waits for nothing."""
        self._fence = Fence(self._devices)

    def keep_up(self, names: Sequence[str]) -> None:
        """Let nobody wait for this process while it heals.

        Args:
            names: Of the parameters, in the order of the optimizer, which changes each of them by its own gradient.
        """
        self._names = names

    # As a donor.

    def meet(self, quorum_id: int) -> str | None:
        """Register what all have alike, for the quorum that is about to meet; called by the process group.

        Returns:
            What the others are to know; None where this process has nothing to give.
        """
        source = self._source
        if source is None:
            return None
        try:
            common = source.common()
        except CheckpointError as error:
            logger.warning("this process cannot be a donor: %s", error)
            common = []
        self._withdraw_offers()
        self._quorum = quorum_id
        step = source.step()
        handle = self._register(common, step)
        if handle is None:
            return None
        return Donor(replica=self._replica, step=step, layout=self._layout, handle=handle).to_text()

    def give(self, step: int) -> None:
        """Somebody else heals in another step of the same quorum: register again what all have alike, and say so.

        Never raises: whoever heals has its assigned donor.
        """
        source = self._source
        if source is None:
            return
        try:
            if self._announced and self._serial != self._serial_of(step):
                self._withdraw_offers()
            handle = self._register(source.common(), step)
            if handle is not None:
                donor = Donor(replica=self._replica, step=step, layout=self._layout, handle=handle)
                self._announce_text(GIVES, step, donor.to_text())
        except SkyMonarchError as error:
            logger.info("this process gives nothing in step %d: %s", step, error)

    def _announce_text(self, name: str, step: int, text: str) -> None:
        with self._lock:
            self._serial, self._announced = self._serial_of(step), True
        self._domain.announce(name, self._serial, text)

    def _register(self, common: list[Leaf], step: int) -> str | None:
        """Let others read ``common``, which may be registered already; None where there is nothing to give."""
        self._know(leaf.tensor for leaf in common)
        memory = memory_of_leaves((leaf.tensor for leaf in common), self._fence)
        registered = (step, [(leaf.tensor.data_ptr(), leaf.tensor.nbytes) for leaf in common])
        with self._lock:
            self._common, self._layout = common, layout_of(common)
            handle = self._common_handle if self._registered == registered and not self.torn else None
        if handle is None:
            self._withdraw()
            if self.torn or not common:
                return None
            handle = self._domain.register(memory, epoch=step)
            with self._lock:
                self._common_handle, self._registered = handle, registered
        return handle

    def _know(self, tensors: Iterable[torch.Tensor]) -> None:
        """What lies on another device than all before is used from here on."""
        new = {one.device for one in tensors} - self._devices
        if new:
            self._devices |= new
            self._fence = Fence(new, self._fence)

    def _offer(self, memory: Memory, epoch: int) -> str:
        handle = self._domain.register(memory, epoch=epoch)
        with self._lock:
            self._offers.append(handle)
        return handle

    def metadata(self) -> str:
        """Where a joiner finds this donor."""
        return f"{_SCHEME}{self._domain.address}"

    def send_checkpoint(
        self,
        dst_ranks: list[int],  # noqa: ARG002
        step: int,
        state_dict: Any,
        timeout: timedelta,  # noqa: ARG002
    ) -> None:
        """Offer the whole state to the joiners that this donor was assigned to.

        Raises:
            CheckpointError: It holds something that cannot be handed over.
        """
        try:
            self._announce(step, state_dict)
        except SkyMonarchError:
            # The joiner waits for this word, and all others for the joiner.
            self._domain.retract(self._serial_of(step))
            raise

    def _serial_of(self, step: int) -> int:
        """Of what is announced in the newest quorum for ``step``; it only grows."""
        return self._quorum * _STEPS_A_QUORUM + step

    def _announce(self, step: int, state_dict: Any) -> None:
        if self.torn:
            raise CheckpointError("this process's parameters are of no step: it cannot be a donor")
        self._fence.block_this_thread()  # before running means are copied
        tree, leaves = encode(state_dict)
        if self._common_handle is None and self._source is not None:
            # The members met some steps ago, and the joiner is still reading.
            self._register(self._source.common(), step)
        common = {leaf.path: leaf.tensor for leaf in self._common}
        shapes: list[Shape] = []
        paths: list[tuple[str, ...] | None] = []
        own: list[torch.Tensor] = []
        for leaf in leaves:
            # What Manager calls ("user", key, …) is (key, …) here.
            path = leaf.path[1:] if leaf.path[0] == "user" else leaf.path
            tensor = common.get(path)
            paths.append(None if tensor is None else path)
            if tensor is None:
                in_forward = path[0] == MODEL  # running means: the forward pass writes to them
                copied = in_forward or not Shape.of(leaf.tensor).is_dense
                tensor = leaf.tensor.contiguous().clone() if copied else leaf.tensor
                own.append(tensor)
            shapes.append(Shape.of(tensor))
        if [path for path in paths if path is not None] != [leaf.path for leaf in self._common]:
            # Their bytes would lie elsewhere than the joiner looks for them.
            raise CheckpointError("the state has other tensors than when the quorum met")
        fence = Fence({one.device for one in own}, self._fence)  # after the copies, too
        manifest = Manifest(
            step=step,
            replica=self._replica,
            layout=self._layout,
            tree=tree,
            shapes=shapes,
            paths=paths,
            common=self._common_handle,
            own=self._offer(memory_of_leaves(own, fence), step) if own else None,
        )
        data = manifest.to_bytes()
        handle = self._offer(memory_of(data), step)
        self._announce_text(_STATE, step, json.dumps({"handle": handle, "nbytes": len(data)}))

    def arrived(self) -> None:
        """This process has computed its gradients: who still reads need not be waited for, where it can keep up."""
        with self._lock:
            serial = self._serial if self._offers else None
        if serial is not None:
            try:
                self._domain.announce(ARRIVED, serial, "")
            except SkyMonarchError as error:
                logger.info("the joiner is not told that it is waited for: %s", error)

    def disallow_checkpoint(self) -> None:
        """Withdraw everything, before the optimizer changes it; waits a moment for pieces under way."""
        if self._source is None or not self._source.failed():
            self._withdraw()

    def _withdraw(self) -> None:
        self._withdraw_offers()
        with self._lock:
            handle, self._common_handle = self._common_handle, None
        if handle is not None:
            self._deregister(handle)

    def _withdraw_offers(self) -> None:
        with self._lock:
            handles, self._offers = self._offers, []
            announced, self._announced = self._announced, False
        if announced:
            self._domain.retract(self._serial)
        for handle in handles:
            self._deregister(handle)

    def _deregister(self, handle: str) -> None:
        if self._domain.deregister(handle, timeout_s=_WITHDRAW_S):
            logger.warning("a joiner took too long over a piece: it has to read it elsewhere")

    # As a joiner.

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:  # noqa: ARG002
        """Read the state of ``step``: what all have alike from all who have it, the rest from ``metadata``.

        Raises:
            PeerRefusedError: The donor does not belong to this run; nothing of it was read.
            CheckpointError: What it says is no state, or none of this model.
            TransferError: Nobody was left who gave it whole.
            ChannelError: The donor is gone, or took too long.
        """
        began_s = time.monotonic()
        if not metadata.startswith(_SCHEME):
            raise CheckpointError(
                f"the donor gives its state another way: {metadata!r}",
                hint="`recovery.healing` must be the same for all groups",
            )
        deadline_s = began_s + timeout.total_seconds()

        def left_s() -> float:
            return max(0.01, deadline_s - time.monotonic())

        self.following = None
        address = metadata.removeprefix(_SCHEME)
        manifest = self._read_manifest(address, step, left_s)
        if manifest.step != step:
            raise CheckpointError(f"the donor offers step {manifest.step}, not {step}")
        arrival = self._arrival_of(manifest)
        self._donors = donors = Donors(self._domain, manifest, self._replica, self._serial_of(step))
        donors.met(self._neighbours)
        if self._tunnel is not None:
            self._tunnel.reach("donors", donors.addresses)
        # New tensors may lie where old ones are still in use.
        self._know(arrival.places)
        fence = Fence(self._devices, self._fence)
        if arrival.nbytes:
            # From here on the parameters are of no step, until all of it has come.
            self.torn = True
        self._others = others = OthersWaiting(self._domain, address, self._serial_of(step))
        with others, donors:
            tally = read_state(self._domain, arrival, manifest, donors, others, left_s, fence)
        if tally is None:
            self.following = Following(step=step, here=arrival.here, tree=manifest.tree, arrival=arrival)
            return {"user": {}, "torchft": {"step": step, "batches_committed": 0}}
        if donors.found:
            self._tell(donors.found, tally, arrival)
        state = decode(manifest.tree, arrival.places)
        self.torn, self._arrival = False, None
        at_s = time.monotonic()
        self._heal = Heal(
            at_s=at_s,
            took_s=at_s - arrival.began_s,
            bytes=arrival.moved,
            donor=manifest.replica,
            step=step,
        )
        return state

    def _arrival_of(self, manifest: Manifest) -> Arrival:
        """What has come of the state so far, where it is of the same tensors."""
        arrival = self._arrival
        if arrival is None or not arrival.fits(manifest):
            arrival = Arrival(manifest, self._places(manifest), self._names or ())
            arrival.held = self._names is None
        self._arrival = arrival
        arrival.go_on_at(manifest.step)
        return arrival

    def _read_manifest(self, address: str, step: int, left_s: Callable[[], float]) -> Manifest:
        if self._tunnel is not None:
            self._tunnel.reach("state", [address])
        word = self._domain.lookup(address, _STATE, self._serial_of(step), timeout_s=left_s())
        try:
            offer = json.loads(word)
            handle, nbytes = str(offer["handle"]), int(offer["nbytes"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"the donor's word is malformed: {error!r}") from error
        if not 0 < nbytes <= _MOST_MANIFEST_BYTES:
            raise CheckpointError(f"the donor's description of its state has {nbytes} bytes")
        data = bytearray(nbytes)
        self._domain.read_into([handle], memory_of(data, writable=True), timeout_s=left_s())
        return Manifest.of_bytes(bytes(data))

    def _places(self, manifest: Manifest) -> list[torch.Tensor]:
        """A tensor for each of the manifest: this process's own where it has one like it.

        Raises:
            CheckpointError: The parameters of the donor are not those of this model.
        """
        mine, theirs = {leaf.path: leaf.tensor for leaf in self._common}, set(manifest.paths)
        for name, tensor in mine.items():
            if name[0] == MODEL and name not in theirs:
                raise CheckpointError(
                    f"the donor has no parameter {'.'.join(name[1:])} ({tuple(tensor.shape)})"
                )
        places = []
        for shape, path in zip(manifest.shapes, manifest.paths, strict=True):
            found = None if path is None else mine.get(path)
            if found is not None and Shape.of(found) != shape:
                if path is not None and path[0] == MODEL:
                    raise CheckpointError(
                        f"{'.'.join(path[1:])} is {Shape.of(found)} here, {shape} at the donor"
                    )
                found = None
            places.append(shape.empty(self._device) if found is None else found)
        return places

    def _tell(self, donors: Sequence[Donor], tally: Tally, arrival: Arrival) -> None:
        """Say what came from whom: in all steps together, and how it went in the last one."""
        parts = ((donor, tally.of(donor)) for donor in donors)
        shares = ", ".join(
            f"{arrival.gave.get(donor.replica, 0) / 2**20:.0f} MiB of replica {donor.replica} "
            f"by {part.path or 'nothing'}" + (f" (lost: {part.lost})" if part.lost else "")
            for donor, part in parts
        )
        right = f", {tally.kept / 2**20:.0f} MiB was right" if tally.kept else ""
        took_s = time.monotonic() - arrival.began_s
        logger.info("healed in %.2f s: %s; %d pieces read again%s", took_s, shares, tally.again, right)

    def take_heal(self) -> Heal | None:
        """The last state that this process received, once; None where there was none since."""
        heal, self._heal = self._heal, None
        return heal

    def shutdown(self, wait: bool = True) -> None:  # noqa: ARG002
        """Withdraw everything and hang up."""
        for asking in (self._others, self._donors):
            if asking is not None:
                asking.join()
        try:
            self._withdraw()
        except SkyMonarchError as error:
            logger.info("leaving: %s", error)
        self._domain.close()
