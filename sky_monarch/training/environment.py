"""What a rank process is told by its environment. The one place where the session reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from sky_monarch.config.problem import FieldRefusalError
from sky_monarch.config.sync import read_sync
from sky_monarch.errors import ConfigError

__all__ = ["LOCAL_ADDRESS", "AgentAddress", "RankEnvironment"]

# Numeric, so that no host name has to resolve.
LOCAL_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAddress:
    """Where this rank's agent listens, and the secret of the run."""

    address: str
    token: str
    run_id: str

    def __repr__(self) -> str:
        return f"AgentAddress(address={self.address!r}, run_id={self.run_id!r}, token=…)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """This process's place in the run.

    Attributes:
        replica: Replica group, ``0..replicas``.
        rank: Rank inside the group, ``0..world_size``.
        generation: Counts the group's restarts from 1; 0 outside sky-monarch, and on standby.
        lighthouse: ``TORCHFT_LIGHTHOUSE``; None for a process that runs alone.
        lighthouse_kind: ``sky-monarch`` (is told of deaths) or ``torchft`` (waits for heartbeats).
        store: ``(host, port)`` of the group's store; None where the group is this process alone.
        agent: None outside sky-monarch.
        address: Numeric address where other groups reach this process.
        tunnel: Where the agent is told whom this process is about to dial, ``unix:<path>``; None where hosts reach each
            other by themselves.
        checkpoint: JSON of the job's ``checkpoint``; None without.
        sync: The job's, where it is not ``every_step``.
        healing: How a group that heals gets its state: ``striped`` or ``http``.
    """

    replica: int = 0
    replicas: int = 1
    min_replicas: int = 1
    rank: int = 0
    world_size: int = 1
    generation: int = 0
    lighthouse: str | None = None
    lighthouse_kind: str = "torchft"
    store: tuple[str, int] | None = None
    agent: AgentAddress | None = None
    address: str = LOCAL_ADDRESS
    tunnel: str | None = None
    checkpoint: str | None = None
    sync: str | None = None
    healing: str = "striped"

    @property
    def replica_id(self) -> str:
        """The group's name at the lighthouse.

        It sorts by replica, carries the generation for fencing, and ends in the replica, which is where
        TorchFT looks for it.
        """
        return f"rep_{self.replica}.g{self.generation}_{self.replica}"

    def check_identity(self) -> None:
        """Refuse to train as nobody: a standby has no generation, and so has what it starts.

        Raises:
            ConfigError: This process belongs to a standby that was not promoted.
        """
        if self.agent is not None and self.generation == 0:
            raise ConfigError(
                "this process was started by a standby, and belongs to no generation",
                hint="start processes inside the session, or set recovery.standby_until: imports",
            )

    @classmethod
    def read(cls, env: Mapping[str, str] = os.environ) -> RankEnvironment:
        """Read and check the environment.

        Raises:
            ConfigError: A variable is malformed, contradicts another or is missing; the message names it.
        """

        def number(name: str, default: int, *, other: str | None = None) -> int:
            key = name if name in env or other is None or other not in env else other
            text = env.get(key)
            if text is None:
                return default
            if not text.isdecimal():
                raise ConfigError(f"{key} is {text!r}; it must be a whole number")
            return int(text)

        replica = number("SKY_MONARCH_REPLICA", 0, other="REPLICA_GROUP_ID")
        replicas = number("SKY_MONARCH_REPLICAS", 1, other="NUM_REPLICA_GROUPS")
        rank = number("SKY_MONARCH_RANK", 0, other="RANK")
        world_size = number("WORLD_SIZE", 1)
        lighthouse = env.get("TORCHFT_LIGHTHOUSE") or None
        if replica >= replicas:
            raise ConfigError(
                f"this is replica {replica}, but there are {replicas}: REPLICA_GROUP_ID counts from 0"
            )
        if rank >= world_size:
            raise ConfigError(f"RANK is {rank}, but WORLD_SIZE is {world_size}: RANK counts from 0")
        generation = number("SKY_MONARCH_GENERATION", 0)
        on_standby = generation == 0 and bool(env.get("SKY_MONARCH_AGENT"))
        if lighthouse is None and replicas > 1 and not on_standby:
            raise ConfigError(
                f"NUM_REPLICA_GROUPS is {replicas}, but TORCHFT_LIGHTHOUSE is not set",
                hint="start the job with `sky-monarch up`, or set it to the address of a lighthouse",
            )
        store = None
        if world_size > 1:
            if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
                raise ConfigError(
                    f"WORLD_SIZE is {world_size}, but MASTER_ADDR and MASTER_PORT are not set",
                    hint="start the job with `sky-monarch up`, or with torchrun",
                )
            store = (env["MASTER_ADDR"], number("MASTER_PORT", 0))
        agent = None
        if env.get("SKY_MONARCH_AGENT"):
            missing = [name for name in ("SKY_MONARCH_TOKEN", "SKY_MONARCH_RUN_ID") if not env.get(name)]
            if missing:
                raise ConfigError(f"SKY_MONARCH_AGENT is set, but {' and '.join(missing)} are not")
            agent = AgentAddress(
                address=env["SKY_MONARCH_AGENT"],
                token=env["SKY_MONARCH_TOKEN"],
                run_id=env["SKY_MONARCH_RUN_ID"],
            )
        sync = env.get("SKY_MONARCH_SYNC") or None
        try:
            sync = sync and read_sync(sync)
        except FieldRefusalError as error:
            raise ConfigError(f"SKY_MONARCH_SYNC {error}") from error
        healing = env.get("SKY_MONARCH_HEALING") or "striped"
        if healing not in ("striped", "http"):
            raise ConfigError(f"SKY_MONARCH_HEALING is {healing!r}; it must be striped or http")
        return cls(
            replica=replica,
            replicas=replicas,
            min_replicas=number("SKY_MONARCH_MIN_REPLICAS", 1),
            rank=rank,
            world_size=world_size,
            generation=generation,
            lighthouse=lighthouse,
            lighthouse_kind=env.get("SKY_MONARCH_LIGHTHOUSE_KIND", "torchft"),
            store=store,
            agent=agent,
            address=env.get("SKY_MONARCH_ADDRESS") or LOCAL_ADDRESS,
            tunnel=env.get("SKY_MONARCH_TUNNEL") or None,
            checkpoint=env.get("SKY_MONARCH_CHECKPOINT") or None,
            sync=sync,
            healing=healing,
        )
