"""The working folder as hosts get it: what git would take along, by one rule on every transport.

That is what is tracked, and what is neither tracked nor ignored. Without git, or outside of a repository, all
``.gitignore`` files of the folder are read instead. SkyPilot has rules of its own, which differ from one transport to
the next; it gets a copy to which none of them applies.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sky_monarch.errors import ConfigError, LaunchError
from sky_monarch.launch.ignoring import Rule, read_rules

__all__ = ["LARGEST", "LARGE_BYTES", "Listing", "list_workdir", "stage_workdir"]

LARGE_BYTES = 1 << 30
"""From here on somebody should be asked whether all of it is meant to travel."""

LARGEST = 3
"""So many of the largest entries are named."""

_GIT_S = 120.0
_SKYIGNORE = ".skyignore"
_NEVER = frozenset((".git", _SKYIGNORE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What of a folder is shipped.

    Attributes:
        source: The folder.
        files: Files and symbolic links, relative, in order.
        empty: Folders in which nothing is, relative, in order.
        size_bytes: Of all files.
        rule: Who said what is ignored: ``git``, or ``.gitignore files``.
        outward: Symbolic links that lead out of the folder: their targets stay here.
        largest: What at its top is largest, and how large: `LARGEST` entries at the most, largest first.
        environments: Virtual environments in it, relative: of no use on another machine.
    """

    source: Path
    files: tuple[str, ...]
    empty: tuple[str, ...]
    size_bytes: int
    rule: str
    outward: tuple[str, ...] = ()
    largest: tuple[tuple[str, int], ...] = ()
    environments: tuple[str, ...] = ()

    @property
    def large(self) -> bool:
        """Whether it is more than code."""
        return self.size_bytes > LARGE_BYTES

    def summary(self) -> dict[str, Any]:
        """What is shown before anything is copied, as JSON values."""
        return {
            "workdir": str(self.source),
            "rule": self.rule,
            "files": len(self.files),
            "bytes": self.size_bytes,
            "large": self.large,
            "largest": [{"name": name, "bytes": size_bytes} for name, size_bytes in self.largest],
            "environments": list(self.environments),
            "links_outward": list(self.outward),
        }


def list_workdir(source: Path, *, without: Path | None = None) -> Listing:
    """Look at what would be shipped; copy nothing.

    Args:
        source: The working folder.
        without: A folder that is left out although it may lie in it: that of the runs.

    Raises:
        ConfigError: It cannot be read.
    """
    if not source.is_dir():
        raise ConfigError(f"workdir {source} is no folder")
    try:
        found = _by_git(source)
        rule = "git" if found is not None else ".gitignore files"
        names, empty = found if found is not None else _by_files(source)
        return _measured(source, names, empty, rule, without)
    except OSError as error:
        raise ConfigError(f"workdir {source} cannot be read: {error}") from error


def _measured(source: Path, names: list[str], empty: list[str], rule: str, without: Path | None) -> Listing:
    outside = () if without is None else _inside(source, without) or ()

    def is_left_out(name: str) -> bool:
        parts = PurePosixPath(name).parts
        return not _NEVER.isdisjoint(parts) or (bool(outside) and parts[: len(outside)] == outside)

    files, outward, environments, sizes = [], [], [], Counter[str]()
    for name in sorted(set(names)):
        if is_left_out(name):
            continue
        try:
            seen = (source / name).lstat()
        except (FileNotFoundError, NotADirectoryError):  # tracked, but deleted here
            continue
        if stat.S_ISLNK(seen.st_mode):
            if _inside(source, (source / name).resolve()) is None:
                outward.append(name)
        elif stat.S_ISREG(seen.st_mode):
            path = PurePosixPath(name)
            sizes[path.parts[0]] += seen.st_size
            if path.name == "pyvenv.cfg" and len(path.parts) > 1:
                environments.append(str(path.parent))
        else:  # a socket, a pipe, a device
            continue
        files.append(name)
    return Listing(
        source=source,
        files=tuple(files),
        empty=tuple(name for name in sorted(set(empty)) if not is_left_out(name)),
        size_bytes=sizes.total(),
        rule=rule,
        outward=tuple(outward),
        largest=tuple(sizes.most_common(LARGEST)),
        environments=tuple(environments),
    )


def _inside(source: Path, path: Path) -> tuple[str, ...] | None:
    """Parts of a path below ``source``; None where it is not below."""
    try:
        return path.resolve().relative_to(source.resolve()).parts
    except ValueError:
        return None


# --- git ---


def _git(folder: Path, *arguments: str, given: bytes | None = None) -> bytes | None:
    """What git answers; None where it cannot: it is not there, this is no repository, or not one of this user."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            input=given,
            stdin=subprocess.DEVNULL if given is None else None,
            capture_output=True,
            env={**env, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
            timeout=_GIT_S,
            check=False,
        )
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"git did not list {folder} within {_GIT_S:.0f} s", hint="is it on a network file system?"
        ) from error
    # check-ignore says with 1 that none of the names is ignored.
    fine = done.returncode == 0 or (arguments[0] == "check-ignore" and done.returncode == 1)
    return done.stdout if fine else None


def _split(output: bytes) -> list[str]:
    return [os.fsdecode(name) for name in output.split(b"\0") if name]


def _by_git(source: Path) -> tuple[list[str], list[str]] | None:
    """Files, and empty folders, as git sees them; None where it does not answer for this folder."""
    shown = _git(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if shown is None:
        return None
    # A folder that the repository around it ignores is none of its business.
    if not shown and _git(source, "check-ignore", "-z", "--stdin", given=b".\0"):
        return None
    files: list[str] = []
    empty: list[str] = []
    for name in _split(shown):
        path = source / name
        if not path.is_dir() or path.is_symlink():
            files.append(name)
            continue
        # A submodule, or a repository that nobody told the outer one of: a rule of its own.
        inner = name.rstrip("/")
        within = (_by_git(path) if (path / ".git").exists() else None) or _by_files(path)
        files += [f"{inner}/{each}" for each in within[0]]
        empty += [f"{inner}/{each}" for each in within[1]]
    return files, empty + _empty_by_git(source)


def _empty_by_git(source: Path) -> list[str]:
    """Empty folders that are not ignored; git itself knows of files only."""
    ignored = _git(source, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    skipped = {name.rstrip("/") for name in _split(ignored or b"")}
    found = list(_empty_folders(source, lambda name: name in skipped))
    if not found:
        return []
    asked = b"".join(os.fsencode(name) + b"\0" for name in found)
    listed = set(_split(_git(source, "check-ignore", "-z", "--stdin", given=asked) or b""))
    return [name for name in found if name not in listed]


def _empty_folders(source: Path, is_skipped: Callable[[str], bool]) -> Iterator[str]:
    for folder, folders, files in os.walk(source):
        here = Path(folder).relative_to(source).as_posix()
        if here != "." and not folders and not files:
            yield here
        prefix = "" if here == "." else f"{here}/"
        folders[:] = [
            name
            for name in folders
            if name not in _NEVER
            and not is_skipped(f"{prefix}{name}")
            and not (Path(folder, name, ".git").exists())  # a repository of its own
        ]


# --- without git ---


def _by_files(source: Path) -> tuple[list[str], list[str]]:
    """Files and empty folders that no ``.gitignore`` of the folder excludes."""
    files: list[str] = []
    empty: list[str] = []
    _descend(source, "", (), files, empty)
    return files, empty


_Rules = tuple[tuple[str, tuple[Rule, ...]], ...]


def _descend(folder: Path, prefix: str, above: _Rules, files: list[str], empty: list[str]) -> None:
    rules = above
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    if not entries and prefix:
        empty.append(prefix.rstrip("/"))
    own = next((entry for entry in entries if entry.name == ".gitignore"), None)
    if own is not None and own.is_file(follow_symlinks=False):  # nor does git follow a link here
        rules = (*above, (prefix, read_rules(Path(own.path))))
    for entry in entries:
        name = f"{prefix}{entry.name}"
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in _NEVER or _is_ignored(name, rules, is_folder=is_folder):
            continue
        if is_folder:
            _descend(Path(entry.path), f"{name}/", rules, files, empty)
        else:
            files.append(name)


def _is_ignored(name: str, rules: _Rules, *, is_folder: bool) -> bool:
    """The last line that says something of this name decides, of the innermost file in which one does."""
    for prefix, lines in reversed(rules):
        for rule in reversed(lines):
            if rule.is_about(name[len(prefix) :], is_folder=is_folder):
                return rule.ignores
    return False


# --- the copy ---


def stage_workdir(listing: Listing, target: Path) -> None:
    """Copy what is shipped, as it is now: a host that is replaced later gets the same.

    Symbolic links stay links, files keep whether they are executable, and empty folders come along.

    Args:
        listing: What to copy.
        target: A folder that does not exist yet.

    Raises:
        LaunchError: Something cannot be read, or the copy not be written.
    """
    target.mkdir(mode=0o700, parents=True)
    made = {target}

    def folder(path: Path) -> None:
        if path not in made:
            path.mkdir(parents=True, exist_ok=True)
            made.add(path)

    for name in listing.files:
        source, copy = listing.source / name, target / name
        try:
            folder(copy.parent)
            _copy(source, copy)
        except (FileNotFoundError, NotADirectoryError):
            continue  # removed since it was listed
        except OSError as error:
            raise LaunchError(
                f"{source} could not be copied for the hosts: {error.strerror or error}",
                hint="leave it out with a .gitignore file, if the job does not need it",
            ) from error
    for name in listing.empty:
        folder(target / name)
    # SkyPilot reads it instead of any .gitignore, and finds nothing to leave out.
    (target / _SKYIGNORE).touch()


def _copy(source: Path, copy: Path) -> None:
    if source.is_symlink():
        copy.symlink_to(source.readlink())
        return
    shutil.copyfile(source, copy)
    seen = source.stat()
    copy.chmod(stat.S_IMODE(seen.st_mode) | stat.S_IWUSR)
    os.utime(copy, ns=(seen.st_atime_ns, seen.st_mtime_ns))
