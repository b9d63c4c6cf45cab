"""Reading a host's files below a root, a bounded part of each."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["Tree", "root_of"]

_MOST_BYTES = 1 << 20
_MOST_SYMBOLS_BYTES = 64 << 20  # a kernel has about 10 MiB of them


#: Only tests set it: a folder with trees of other hosts, by name.
_TREES = "SKY_MONARCH_TEST_DOCTOR_TREES"


def root_of(host: str, environ: Mapping[str, str]) -> Path:
    """Where the files of the host that this is lie: ``/``, unless a test has a tree in its place."""
    trees = environ.get(_TREES)
    tree = Path(trees, host) if trees else None
    return tree if tree is not None and tree.is_dir() else Path("/")


class Tree:
    """The files of one host. What cannot be read is not there: a check says what that means.

    Args:
        root: ``/`` for this host.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def text(self, path: str) -> str | None:
        """A file's text without surrounding blanks; None where it cannot be read."""
        try:
            with (self.root / path).open("rb") as file:
                return file.read(_MOST_BYTES).decode(errors="replace").strip()
        except (OSError, ValueError):
            return None

    def data(self, path: str) -> bytes:
        """A file's bytes; empty where it cannot be read."""
        try:
            with (self.root / path).open("rb") as file:
                return file.read(_MOST_BYTES)
        except OSError:
            return b""

    def number(self, path: str) -> int | None:
        """A file's number, decimal or ``0x``; None where it is none."""
        text = self.text(path)
        try:
            return None if text is None else int(text, 0)
        except ValueError:
            return None

    def names(self, path: str) -> list[str]:
        """Names in a folder, numbers inside them in order; empty where it cannot be read."""
        try:
            found = [entry.name for entry in (self.root / path).iterdir()]
        except OSError:
            return []
        return sorted(found, key=lambda name: (int("0" + "".join(filter(str.isdigit, name))), name))

    def exists(self, path: str) -> bool:
        """Whether it is there."""
        try:
            return (self.root / path).exists()
        except OSError:
            return False

    def properties(self, path: str) -> dict[str, int]:
        """Lines of a name and a number, as KFD writes them."""
        found: dict[str, int] = {}
        for line in (self.text(path) or "").splitlines():
            name, _, value = line.partition(" ")
            try:
                found[name] = int(value)
            except ValueError:
                continue
        return found

    def kernel_config(self, release: str) -> str | None:
        """The configuration of the running kernel, from wherever it lies; None where no file of it is here."""
        try:
            with gzip.open(self.root / "proc/config.gz", "rt", errors="replace") as file:
                return file.read(_MOST_BYTES)
        except (OSError, EOFError):
            pass
        for path in (
            f"boot/config-{release}",
            f"lib/modules/{release}/config",
            f"lib/modules/{release}/build/.config",
        ):
            text = self.text(path)
            if text:
                return text
        return None

    def kernel_symbols(self, wanted: set[str]) -> set[str]:
        """Which of these names the running kernel and its modules have."""
        found = set()
        for line in self._lines("proc/kallsyms", _MOST_SYMBOLS_BYTES):
            parts = line.split(None, 3)
            if len(parts) >= 3 and parts[2] in wanted:
                found.add(parts[2])
        return found

    def _lines(self, path: str, most: int) -> Iterator[str]:
        try:
            with (self.root / path).open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    most -= len(line)
                    if most < 0:
                        return
                    yield line
        except OSError:
            return
