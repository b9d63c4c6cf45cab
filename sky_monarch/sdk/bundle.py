"""One file for whoever is to find out what went wrong with a run; no secret of the run is in it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sky_monarch.errors import ConfigError, SkyMonarchError
from sky_monarch.launch.excerpt import Excerpt, archive, kept
from sky_monarch.launch.folder import Phase, RunFolder, list_runs
from sky_monarch.launch.output import take_output
from sky_monarch.launch.redaction import Redactor
from sky_monarch.sdk import _facts
from sky_monarch.sdk.run import Run

__all__ = ["Bundle", "newest", "write_bundle", "write_new"]

_LOG_BYTES = 32 << 20
_PATIENCE_S = 2.0
_OUTPUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What was written.

    Attributes:
        path: The file.
        run_id: Whose; None: no run was there, it holds facts of the machine alone.
        size_bytes: Its size.
        members: Names of what is in it.
        notes: What is not in it, and why, by name.
    """

    path: Path
    run_id: str | None
    size_bytes: int
    members: tuple[str, ...]
    notes: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "path": str(self.path),
            "run_id": self.run_id,
            "size_bytes": self.size_bytes,
            "members": list(self.members),
            "notes": self.notes,
        }


def newest() -> RunFolder | None:
    """The run that is meant where none is named: the newest live one, else the newest."""
    runs = list_runs()
    live = [folder for folder in runs if folder.phase() in (Phase.LIVE, Phase.LAUNCHING)]
    found = live or runs
    return found[-1] if found else None


def write_bundle(folder: RunFolder | None, target: Path | None = None) -> Bundle:
    """Collect what is known of a run, live or ended or damaged, and write it to one new file.

    Args:
        folder: The run; None: facts of the machine alone.
        target: The file to write; None: one in the current folder, named after the run and the time.

    Raises:
        ConfigError: The target exists, or its folder does not.
    """
    run_id = folder.run_id if folder is not None else None
    if target is None:
        stem = run_id or "sky-monarch"
        target = Path(f"{stem}-debug-{datetime.now().astimezone():%Y%m%d-%H%M%S}.tar.gz")
    _require_free(target)
    members, notes, redactor = _collect(folder)
    facts: dict[str, Any] = {
        "versions.json": _facts.versions(),
        "host.json": _facts.host(folder.path if folder is not None else None),
        "kernel-oom.json": _facts.kernel_oom(),
    }
    if run_id is not None:
        facts["processes.json"] = _facts.processes(run_id)
    for name, value in facts.items():
        # Nothing of this is what ranks have printed; still, a command line may say anything.
        members[name] = redactor.json(json.dumps(value, default=str).encode())
    about = {"run_id": run_id, "made_ms": time.time_ns() // 1_000_000, "notes": notes}
    members = {"about.json": json.dumps(about, indent=1).encode() + b"\n", **members}
    data = archive(members)
    write_new(target, data)
    return Bundle(path=target, run_id=run_id, size_bytes=len(data), members=tuple(members), notes=notes)


def _collect(folder: RunFolder | None) -> tuple[dict[str, bytes], dict[str, str], Redactor]:
    if folder is None:
        return {}, {"run": "there is none on this machine"}, Redactor({})
    private = folder.private
    redactor = Redactor(private, names=folder.variables)
    known = kept(folder) if private is None else None
    if known is not None:
        members, notes = known
        is_json = (".json", ".ndjson", ".pid", ".state")
        members = {
            name: (redactor.json if name.endswith(is_json) else redactor.bytes)(data)
            for name, data in members.items()
        }
    else:
        with _output(folder) as (logs, why_not):
            excerpt = Excerpt(folder, redactor, most_bytes=_LOG_BYTES, logs=logs)
            excerpt.collect()
        members, notes = excerpt.members, excerpt.notes
        if why_not:
            notes["logs"] = f"could not all be had from the head: {redactor.text(why_not)}"
    for name, ask in (("status.json", _status), ("lighthouse-status.json", _lighthouse)):
        try:
            value = ask(folder)
        except (SkyMonarchError, OSError, ValueError) as error:
            notes[name] = f"could not be had: {redactor.text(str(error))}"
            continue
        if value is not None:
            members[name] = json.dumps(redactor.value(value), indent=1).encode() + b"\n"
    if members.get("events.ndjson"):
        members["journal.db"] = _journal(members["events.ndjson"])
    members["folder.txt"] = redactor.bytes("\n".join(_listing(folder.path)).encode() + b"\n")
    return members, notes, redactor


@contextlib.contextmanager
def _output(folder: RunFolder) -> Iterator[tuple[Path | None, str]]:
    """What ranks have printed, of a run that goes on and whose head is elsewhere: that has it, not the folder here.

    Yields:
        Where it is, None: in the folder of the run; and why not all of it is there.
    """
    if folder.head is None or folder.phase() is not Phase.LIVE:
        yield None, ""
        return
    with tempfile.TemporaryDirectory(prefix="sky-monarch-") as name:
        logs, why_not = Path(name), ""
        try:
            with Run(folder) as run:
                take_output(run.output_tar(_LOG_BYTES, limit_s=_OUTPUT_S), logs, max_bytes=_LOG_BYTES)
        except (SkyMonarchError, OSError) as error:
            why_not = str(error)
        yield logs, why_not


def _status(folder: RunFolder) -> dict[str, Any]:
    with Run(folder) as run:
        return run.status(patience_s=_PATIENCE_S).to_json()


def _lighthouse(folder: RunFolder) -> Any:
    """The page of our own lighthouse, on this machine only; another one is not told the token."""
    if folder.phase() is not Phase.LIVE or folder.token is None:
        return None
    with Run(folder) as run:
        found = run.status(patience_s=_PATIENCE_S).lighthouse
    if found is None or found.kind != "sky-monarch" or not (found.address or "").startswith("127.0.0.1:"):
        return None
    import httpx

    headers = {"Authorization": f"Bearer {folder.token}"}
    try:
        with httpx.Client(trust_env=False, timeout=_PATIENCE_S) as client:
            answer = client.get(f"http://{found.address}/status.json", headers=headers)
        return answer.json() if answer.status_code == 200 else {"status_code": answer.status_code}
    except httpx.HTTPError as error:
        raise OSError(str(error)) from error


def _journal(events: bytes) -> bytes:
    """The events as a journal again, for the tools that read one. Made anew: no page of the real one is in it."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, wall_ms INTEGER, kind TEXT, event TEXT)")
        for line in events.splitlines():
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                event = json.loads(line)
                number = event.pop("id")
                row = (number, event.get("wall_ms"), event.get("event"), json.dumps(event))
                db.execute("INSERT OR IGNORE INTO events VALUES (?, ?, ?, ?)", row)
        db.commit()
        return bytes(db.serialize())


def _listing(folder: Path) -> list[str]:
    """What lies in the folder: sizes and times alone."""
    lines = []
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):
            found = path.lstat()
            lines.append(
                f"{found.st_mode:06o} {found.st_size:>12} {found.st_mtime:.3f} {path.relative_to(folder)}"
            )
        if len(lines) >= 10_000:
            break
    return lines


def _require_free(target: Path) -> None:
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists", hint="name another file with -o")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {target.parent}")


def write_new(target: Path, data: bytes) -> None:
    """Write a file that is whole or not there, and replaces nothing."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(2)}")
    try:
        handle = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        with os.fdopen(handle, "wb") as file, io.BytesIO(data) as source:
            while chunk := source.read(1 << 20):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, target)
        except FileExistsError:
            raise ConfigError(f"{target} exists", hint="name another file with -o") from None
    finally:
        temporary.unlink(missing_ok=True)
