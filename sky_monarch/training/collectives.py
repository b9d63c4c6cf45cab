"""Averaging gradients over the replica groups of the current quorum."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from sky_monarch.errors import ConfigError, QuorumError
from sky_monarch.training.contributions import Contributions
from sky_monarch.training.sharding import like, local_of

if TYPE_CHECKING:
    from torchft import Manager

__all__ = ["BUCKET_BYTES", "GradientBuckets"]

# Bounds what one collective sends: a lost connection then loses little, and two are under way at a time.
BUCKET_BYTES = 25 * 1024 * 1024


@dataclass
class _Flat:
    """One buffer for all gradients of one dtype on one device, of whole parameters or of sharded ones.

    Attributes:
        params: In the order in which their gradients lie in the buffer.
        buffer: Of sharded ones it holds this rank's shards.
        views: Of ``buffer``, one a parameter, in its (or its shard's) shape.
        buckets: Of ``buffer``, consecutive, each of at most the bucket size.
        sharded: Whether the ranks of the group have averaged them already, as FSDP does.
    """

    params: list[torch.nn.Parameter]
    buffer: torch.Tensor
    views: list[torch.Tensor]
    buckets: list[torch.Tensor]
    sharded: bool


class GradientBuckets:
    """The gradients of some parameters, in flat buffers that are reduced bucket by bucket.

    The parameters' own ``.grad`` stay as they are until :meth:`unpack`: a reduction that failed half-way
    can be done again from the same local gradients. The flat buffers are the only copy.

    Args:
        params: Those that require a gradient take part; all replicas must pass them in the same order.
        bucket_bytes: Most bytes of one collective.

    Raises:
        ConfigError: No parameter requires a gradient.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], *, bucket_bytes: int = BUCKET_BYTES) -> None:
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes is {bucket_bytes}; it must be positive")
        groups: dict[tuple[torch.dtype, torch.device, bool], list[torch.nn.Parameter]] = {}
        seen: set[int] = set()
        for param in params:
            if param.requires_grad and id(param) not in seen:  # tied weights are one parameter
                seen.add(id(param))
                kind = (param.dtype, param.device, isinstance(param, DTensor))
                groups.setdefault(kind, []).append(param)
        if not groups:
            raise ConfigError("the model has no parameter that requires a gradient")
        self._flats = [self._flat(members, kind[2], bucket_bytes) for kind, members in groups.items()]

    @staticmethod
    def _flat(params: list[torch.nn.Parameter], sharded: bool, bucket_bytes: int) -> _Flat:
        held = [local_of(param.detach()) for param in params]
        buffer = torch.zeros(sum(one.numel() for one in held), dtype=params[0].dtype, device=params[0].device)
        parts = buffer.split([one.numel() for one in held])
        views = [part.view(one.shape) for part, one in zip(parts, held, strict=True)]
        # Of a small parameter some ranks hold nothing.
        buckets = list(buffer.split(max(1, bucket_bytes // buffer.element_size()))) if buffer.numel() else []
        return _Flat(params, buffer, views, buckets, sharded)

    @property
    def buckets(self) -> list[torch.Tensor]:
        """All buckets, each of shape ``(n,)``, contiguous, sharing memory with the flat buffers."""
        return [bucket for flat in self._flats for bucket in flat.buckets]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def pack(self, weight: float = 1.0) -> None:
        """Copy the parameters' gradients into the buffers; a parameter without one counts as zero.

        Args:
            weight: What they are multiplied by there. With 0 even a gradient that is not a number is zero.

        Raises:
            ConfigError: A gradient is sparse, or not dealt out as its parameter is.
        """
        for flat in self._flats:
            for param, view in zip(flat.params, flat.views, strict=True):
                if param.grad is None or weight == 0:
                    view.zero_()
                elif param.grad.is_sparse:
                    raise ConfigError(
                        "a gradient is sparse; only dense ones are averaged",
                        hint="build the embedding with sparse=False",
                    )
                elif flat.sharded and param.grad.placements != param.placements:
                    raise ConfigError(
                        f"a gradient is {param.grad.placements}, its parameter {param.placements}"
                    )
                else:
                    view.copy_(local_of(param.grad))
            if weight not in (0, 1):
                flat.buffer *= weight

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def unpack(self) -> None:
        """Copy the buffers into the parameters' gradients.

        A parameter that had no gradient here gets one: another replica may have used it, and all apply the
        same update.
        """
        for flat in self._flats:
            for param, view in zip(flat.params, flat.views, strict=True):
                if param.grad is None:
                    param.grad = like(param, view.clone())
                else:
                    local_of(param.grad).copy_(view)

    def average_within(self, inner: dist.ProcessGroup, contributions: Contributions | None = None) -> None:
        """Average the buffers over the ranks of this replica group, in place, but for what is sharded over them.

        Args:
            inner: Those ranks.
            contributions: Offered; summed up beside the buffers.

        Raises:
            QuorumError: A rank of this replica group left.
        """
        whole = [one for flat in self._flats if not flat.sharded for one in flat.buckets]
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        try:
            works = [inner.allreduce([bucket], options) for bucket in whole]
            for work in [*works, *([contributions.within(inner)] if contributions else [])]:
                work.wait()
        except RuntimeError as error:
            # No vote helps: the whole generation of this group is replaced when one of its ranks dies.
            raise QuorumError(f"another rank of this replica group left: {error}") from error
        for bucket in whole:
            bucket /= inner.size()
        if contributions is not None:
            contributions.require_even()

    def average(
        self,
        manager: Manager,
        *,
        inner: dist.ProcessGroup | None = None,
        contributions: Contributions | None = None,
    ) -> bool:
        """Average the buffers over the participants of the current quorum, in place.

        A replica that heals takes part with zeros and is not counted. The divisor is the number of
        *participants*, which changes when a replica leaves or joins: the average is right at every size.

        Args:
            manager: Its quorum must have been started.
            inner: The ranks of this replica group, averaged over first, but for what is sharded over them;
                None for groups of one rank.
            contributions: Offered, where the average is to be over samples; None for one over ranks.

        Returns:
            False if a member left in mid-collective. The buffers are then undefined, and the manager votes
            no.

        Raises:
            QuorumError: A rank of this replica group left.
            ConfigError: Its ranks share gradients that weigh differently.
        """
        buckets = self.buckets
        if inner is not None:
            self.average_within(inner, contributions)
        counting = [contributions.across(manager)] if contributions else []
        for work in [*counting, *(manager.allreduce(bucket) for bucket in buckets)]:
            work.wait()
        if contributions is not None and manager.errored() is None:
            contributions.settle(manager)
            if (correction := contributions.correction) != 1:
                for bucket in buckets:
                    bucket *= correction
        return manager.errored() is None
