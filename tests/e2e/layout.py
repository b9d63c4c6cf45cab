"""What a machine of the cluster sees in place of this machine's own files: users, hosts, PATH, Python, /tmp.

Everything is mounted in the machine's own namespace. No account is made on this machine, none has to be removed.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.node_python import TRAIN, NodePython, find_node_python

USER = "trainer"
_FIRST_UID = 61_000

#: SkyPilot sets a node up with `curl … | sh`, which brings uv, and with a Python 3.10 that uv downloads. A machine
#: without the internet has neither: here uv is the one that PyPI has, and that Python is the nodes' own.
_CURL = """#!/bin/bash
case "$*" in
  *astral.sh/uv*) echo 'mkdir -p "$UV_INSTALL_DIR" && ln -sf {bin}/uv "$UV_INSTALL_DIR/uv"' ;;
  *) exec /usr/bin/curl "$@" ;;
esac
"""
_UV = """#!/bin/bash
words=() before=
for word in "$@"; do
  if [ "$before" = --python ] && [ "$word" = 3.10 ]; then word={python}; fi
  words+=("$word") before=$word
done
exec {bin}/uv-itself "${{words[@]}}"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The files of a cluster.

    Attributes:
        root: Folder of all of it.
        uid: Of the one user of the cluster.
        python: The nodes' Python.
        machines: Names of all machines.
    """

    root: Path
    uid: int
    python: NodePython
    machines: tuple[str, ...]

    @property
    def home(self) -> Path:
        """The user's home, which all machines share."""
        return self.root / "home"

    @property
    def cache(self) -> Path:
        """What uv has fetched, for all machines."""
        return self.root / "uv-cache"

    @property
    def bin(self) -> Path:
        """What comes first in the PATH of every machine."""
        return self.root / "bin"

    @property
    def path(self) -> str:
        """The PATH of every machine."""
        own = [str(self.bin), str(self.python.python.parent)]
        usual = ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"]
        return os.pathsep.join([*own, *(folder for folder in usual if folder not in own)])

    def make(self) -> None:
        """Write everything."""
        self.root.chmod(0o755)
        for name in ("etc", "bin", "log", "stash"):
            (self.root / name).mkdir()
        for name in self.machines:
            temporary = self.root / "machines" / name / "tmp"
            temporary.mkdir(parents=True)
            temporary.chmod(0o1777)
            # Where SkyPilot keeps what uv has fetched for a node: the nodes of a site share it here.
            (temporary / f"uv_cache_{self.uid}").symlink_to(self.cache)
        for folder in (self.home, self.cache):
            folder.mkdir()
            os.chown(folder, self.uid, self.uid)
        self.python.lay_out(self.root / "site-packages")
        self._write_etc()
        self._write_bin()

    def _write_etc(self) -> None:
        entry = f"{USER}:x:{self.uid}:{self.uid}::{self.home}:/bin/bash\n"
        added = {
            "passwd": entry,
            "group": f"{USER}:x:{self.uid}:\n",
            "shadow": f"{USER}:*:19000:0:99999:7:::\n",  # no password, and not locked: sshd wants that
        }
        for name, line in added.items():
            place = self.root / "etc" / name
            before = Path("/etc", name).read_text()
            place.write_text(before + ("" if before.endswith("\n") else "\n") + line)
            place.chmod(0o600 if name == "shadow" else 0o644)
        names = " ".join(("localhost", *self.machines))
        (self.root / "etc/hosts").write_text(f"127.0.0.1 {names} {os.uname().nodename}\n")
        # A login shell would begin with the distribution's PATH.
        (self.root / "etc/profile").write_text(f"export PATH={shlex.quote(self.path)}\n")

    def _write_bin(self) -> None:
        values = {"bin": self.bin, "python": self.python.python}
        for name, text in (("curl", _CURL), ("uv", _UV)):
            (self.bin / name).write_text(text.format(**values))
            (self.bin / name).chmod(0o755)
        shutil.copy(_uv(), self.bin / "uv-itself")

    def script(self, name: str, daemons: str) -> str:
        """What the first process of a machine does: mounts, then ``daemons``."""
        root = shlex.quote(str(self.root))
        files = ("passwd", "group", "shadow", "hosts", "profile")
        lines = [
            f"hostname {name}",
            *(f"mount --bind {root}/etc/{file} /etc/{file}" for file in files),
            *self._uncover(name),
            f"mount --bind {root}/site-packages {shlex.quote(str(self.python.mountpoint))}",
        ]
        return "\n".join([*lines, daemons])

    def _uncover(self, name: str) -> list[str]:
        """Mounts that give the machine its own /tmp and /dev/shm, and its user a way to Python below such as /root."""
        temporary = Path("/tmp")
        wanted = [self.python.prefix, self.python.packages]
        covers = {temporary, *filter(None, map(closed_folder, wanted))}
        covered = [path for path in wanted if any(path.is_relative_to(cover) for cover in covers)]
        stashes = {path: self.root / "stash" / str(number) for number, path in enumerate(covered)}
        lines = []
        for path, stash in stashes.items():  # held where nothing covers it
            lines += [_command("mkdir", "-p", stash), _command("mount", "--bind", path, stash)]
        lines += [
            _command("mount", "-t", "tmpfs", "-o", "mode=755", name, cover)
            for cover in sorted(covers - {temporary})
        ]
        lines += [
            _command("mount", "--bind", self.root / "machines" / name / "tmp", temporary),
            _command("mount", "-t", "tmpfs", "-o", "mode=1777", name, "/dev/shm"),
        ]
        for path, stash in stashes.items():
            lines += [_command("mkdir", "-p", path), _command("mount", "--bind", stash, path)]
        return lines


def _command(*words: str | Path) -> str:
    return shlex.join(map(str, words))


def closed_folder(path: Path) -> Path | None:
    """The topmost folder above ``path`` through which only its owner may go; None where there is none."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & 0o001:
            return folder
    return None


def _uv() -> Path:
    """uv itself: not the wrapper that some version managers put into PATH."""
    return TRAIN / "bin/uv"


def free_uid() -> int:
    """A number that no user has."""
    taken = {user.pw_uid for user in pwd.getpwall()}
    return next(uid for uid in range(_FIRST_UID, _FIRST_UID + 1000) if uid not in taken)


def make_layout(root: Path, machines: Sequence[str]) -> Layout:
    """The files of a cluster with these machines below ``root``, which is there and empty."""
    layout = Layout(root=root, uid=free_uid(), python=find_node_python(), machines=tuple(machines))
    layout.make()
    return layout
