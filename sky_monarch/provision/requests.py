"""What was asked of a provider and what became of it: `requests.json` in the run folder.

Written before each act and after it, so that a provisioner that starts again goes on waiting for the same request
of SkyPilot, and knows which clusters are its own. A disk that takes nothing stops no recovery: what could not be
written is written with the next change.
"""

from __future__ import annotations

import contextlib
import enum
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import structlog

from sky_monarch.launch.folder import write_json
from sky_monarch.launch.placement import cluster_name

__all__ = ["Phase", "Record", "Requests"]

_log = structlog.get_logger()
_VERSION = 1


class Phase(enum.StrEnum):
    """How far a host came."""

    LAUNCHING = "launching"
    UP = "up"
    ENDED = "ended"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One host.

    Attributes:
        host: Its name.
        attempt: Which attempt.
        phase: How far it came.
        choice: Number of the choice in which it was launched last; None before that.
        infra: Where exactly it was to be, following others.
        request_id: SkyPilot's id of the launch that is under way.
        asked_ms: When that was to be asked for, Unix time: a request of this cluster from then on is ours.
        since_ms: Of a head: when its launch began, Unix time; it bills from then on.
        place: Where it is.
        usd_per_hour: What it costs.
        kind: Of a failure; while it is launched, of that in the choice before.
        reason: Why it ended or failed.
        left: Why its cluster could not be taken down, where something of it may be left; empty where nothing is known
            to be.
    """

    host: str
    attempt: int
    phase: Phase
    choice: int | None = None
    infra: str | None = None
    request_id: str | None = None
    asked_ms: int | None = None
    since_ms: int | None = None
    place: str | None = None
    usd_per_hour: float | None = None
    kind: str | None = None
    reason: str = ""
    left: str = ""

    @property
    def cluster(self) -> str:
        """Name of its cluster."""
        return cluster_name(self.host, self.attempt)

    @property
    def stands(self) -> bool:
        """Whether its cluster is there as far as is known: it holds room, and bills."""
        return self.phase in (Phase.LAUNCHING, Phase.UP) or bool(self.left)

    @property
    def asked(self) -> bool:
        """Whether a provider was ever asked for it: else there is nothing of it to end."""
        return self.choice is not None or self.phase in (Phase.UP, Phase.ENDED)


class Requests:
    """All of them. Safe to use from any thread.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._hosts: dict[str, Record] = {}
        self._older: dict[str, Record] = {}  # by cluster
        self._candidates: Mapping[str, Any] = {}
        self._complained = False
        self._lost = False
        self._read()

    def _read(self) -> None:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            self._hosts = {host: _record(values) for host, values in content["hosts"].items()}
            older = map(_record, content.get("older") or ())
            self._older = {record.cluster: record for record in older}
            self._candidates = dict(content.get("candidates") or {})
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            # Clusters keep their names: what is theirs is found by those.
            _log.warning("requests.json cannot be read, and is begun anew", error=str(error))
            self._hosts, self._older, self._candidates, self._lost = {}, {}, {}, True
            with contextlib.suppress(OSError):
                self._path.replace(self._path.with_suffix(".json.damaged"))

    @property
    def lost(self) -> bool:
        """Whether there was a file that could not be read: clusters of this run may be in no record."""
        return self._lost

    @property
    def candidates(self) -> Mapping[str, Any]:
        """What :class:`Candidates` stored last."""
        with self._lock:
            return self._candidates

    def get(self, host: str) -> Record | None:
        """The record of a host; None where nothing was asked for it, or it was taken down."""
        with self._lock:
            return self._hosts.get(host)

    def of_cluster(self, cluster: str) -> Record | None:
        """The record of a cluster, be it of the newest attempt at its host or of an older one."""
        with self._lock:
            newest = (record for record in self._hosts.values() if record.cluster == cluster)
            return next(newest, self._older.get(cluster))

    def hosts(self) -> tuple[str, ...]:
        """Names of all of which anything may be left."""
        with self._lock:
            return tuple(dict.fromkeys((*self._hosts, *(record.host for record in self._older.values()))))

    def older(self, host: str | None = None) -> tuple[Record, ...]:
        """Attempts that are over, of this host or all, of which a cluster may be left."""
        with self._lock:
            return tuple(record for record in self._older.values() if host in (None, record.host))

    def retire(self, record: Record, *, candidates: Mapping[str, Any]) -> None:
        """An attempt is over, and its cluster is to go; its host has no record until the next one begins."""
        with self._lock:
            self._older[record.cluster] = record
            if (newest := self._hosts.get(record.host)) is not None and newest.attempt == record.attempt:
                del self._hosts[record.host]
            self._candidates = candidates
            self._write()

    def forget(self, record: Record) -> None:
        """Nothing is left of an attempt that was over."""
        with self._lock:
            self._older.pop(record.cluster, None)
            self._write()

    def put(self, record: Record, *, candidates: Mapping[str, Any] | None = None) -> Record:
        """Keep a record, and with it what is known of the choices."""
        with self._lock:
            self._hosts[record.host] = record
            if candidates is not None:
                self._candidates = candidates
            self._write()
        return record

    def change(self, host: str, **changes: Any) -> Record:
        """Change some fields of a record that is there."""
        with self._lock:
            record = replace(self._hosts[host], **changes)
            self._hosts[host] = record
            self._write()
        return record

    def drop(self, host: str, *, candidates: Mapping[str, Any]) -> None:
        """Forget a host: nothing of it is left."""
        with self._lock:
            self._hosts.pop(host, None)
            self._candidates = candidates
            self._write()

    def asked_now(self, host: str) -> Record:
        """Note that a launch is about to be asked for."""
        return self.change(host, request_id=None, asked_ms=time.time_ns() // 1_000_000)

    def _write(self) -> None:
        content = {
            "version": _VERSION,
            "hosts": {host: asdict(record) for host, record in self._hosts.items()},
            "older": [asdict(record) for record in self._older.values()],
            "candidates": self._candidates,
        }
        try:
            write_json(self._path, content, indent=None)
            self._complained = False
        except OSError as error:
            if not self._complained:
                _log.warning("requests.json cannot be written", error=str(error))
            self._complained = True


def _record(values: Mapping[str, Any]) -> Record:
    names = {field.name for field in fields(Record)}
    known = {name: value for name, value in values.items() if name in names}
    return Record(**{**known, "phase": Phase(known["phase"])})
