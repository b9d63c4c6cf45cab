"""What the machines are made of: Debian's kernel, libibverbs and busybox, unpacked, and QEMU, installed."""

from __future__ import annotations

import contextlib
import lzma
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

_QEMU = "qemu-system-x86_64"
#: In the guest, beside what the host has: a provider is a file that libibverbs opens.
_LIBRARIES = ("libibverbs1", "ibverbs-providers", "libnl-3-200", "libnl-route-3-200")
_MODULES = (
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "virtio_net",
    "dummy",
    "crc32_generic",
    "ib_uverbs",
    "rdma_rxe",
)
_DOWNLOAD_S = 300


class UnavailableError(Exception):
    """What is needed cannot be had here: the stage is skipped, and says so."""


class Packages:
    """Everything that a guest needs, in a folder that is kept.

    Args:
        folder: ``build/rdma``: 20 MB once all is there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.kernel = folder / "vmlinuz"
        self.busybox = folder / "busybox"
        self.modules = folder / "modules"
        self.libraries = folder / "lib"

    def ensure(self) -> None:
        """Fetch what is missing.

        Raises:
            UnavailableError: It cannot be had.
        """
        if shutil.which(_QEMU) is None:
            self._install_qemu()
        marker = self._folder / "complete"
        if marker.exists():
            return
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise UnavailableError("this is no Debian: no apt-get and dpkg-deb to get a kernel with")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        with tempfile.TemporaryDirectory(dir=self._folder) as temporary:
            fetched = Path(temporary)
            try:
                kernel = _kernel_package()
            except UnavailableError:
                _update()
                kernel = _kernel_package()
            for package in (kernel, "busybox-static", *_LIBRARIES):
                _run(["apt-get", "download", "--quiet", package], fetched, f"the package {package}")
            for archive in fetched.glob("*.deb"):
                if not archive.name.startswith("linux-image"):
                    _run(
                        ["dpkg-deb", "--extract", str(archive), str(fetched / "root")], fetched, archive.name
                    )
            root = fetched / "root"
            # Where it lies depends on the release.
            shells = [path for path in (root / "bin/busybox", root / "usr/bin/busybox") if path.exists()]
            shutil.copy(shells[0], self.busybox)
            shutil.copytree(root / "usr/lib/x86_64-linux-gnu", self.libraries, symlinks=True)
            self._unpack_kernel(next(fetched.glob("linux-image-*.deb")))
        marker.touch()

    def environment(self) -> dict[str, str]:
        """Variables by which a guest's processes find the libraries; absolute, as on the host."""
        providers = sorted((self.libraries / "libibverbs").glob("librxe-rdmav*.so"))
        if not providers:
            raise UnavailableError("ibverbs-providers has none for rxe")
        # The library adds the version, `-rdmav34.so`, itself.
        provider = str(providers[0]).partition("-rdmav")[0]
        return {"LD_LIBRARY_PATH": str(self.libraries), "IBV_DRIVERS": provider}

    def _install_qemu(self) -> None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            raise UnavailableError(f"no {_QEMU}, and this is no Debian where we are root to install it")
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        # Without an update the lists may name what is no longer there.
        subprocess.run(
            ["apt-get", "update", "--quiet"], capture_output=True, timeout=_DOWNLOAD_S, check=False
        )
        done = subprocess.run(
            ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", "qemu-system-x86"],
            env=quiet,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_S,
            check=False,
        )
        if done.returncode != 0 or shutil.which(_QEMU) is None:
            raise UnavailableError(f"qemu-system-x86 cannot be installed: {_last(done.stderr)}")

    def _unpack_kernel(self, package: Path) -> None:
        """The kernel, and of its modules those that are needed, numbered in the order of loading."""
        found: dict[str, bytes] = {}
        with _files_of(package) as archive:
            for member in archive:
                name = Path(member.name).name
                if name.startswith("vmlinuz"):
                    content = archive.extractfile(member)
                    assert content is not None
                    self.kernel.write_bytes(content.read())
                module = re.fullmatch(r"(.+)\.ko(\.xz)?", name)
                if module is not None and member.isfile() and _may_be_needed(member.name):
                    content = archive.extractfile(member)
                    assert content is not None
                    data = content.read()
                    found[module[1].replace("-", "_")] = lzma.decompress(data) if module[2] else data
        self.modules.mkdir()
        for number, name in enumerate(_in_order(found)):
            (self.modules / f"{number:02}-{name}.ko").write_bytes(found[name])


def _may_be_needed(path: str) -> bool:
    folders = (
        "infiniband",
        "virtio",
        "drivers/net/",
        "/net/",
        "fs/9p",
        "netfs",
        "fscache",
        "/crypto/",
        "/lib/",
    )
    return any(folder in path for folder in folders)


def _in_order(found: dict[str, bytes]) -> list[str]:
    """Of ``_MODULES`` and what they need, each after what it needs; what is in the kernel itself is left out."""
    ordered: list[str] = []

    def add(name: str) -> None:
        if name in ordered or name not in found:
            return
        needs = re.search(rb"\0depends=([^\0]*)\0", found[name])
        for need in (needs[1].decode() if needs else "").split(","):
            add(need.replace("-", "_"))
        ordered.append(name)

    for name in _MODULES:
        add(name)
    if "rdma_rxe" not in ordered:
        raise UnavailableError("this kernel has no rdma_rxe (Debian's cloud kernel has none)")
    return ordered


def _update() -> None:
    """Without it the lists may be empty, or name what is no longer there; where it fails, what follows says so."""
    subprocess.run(["apt-get", "update", "--quiet"], capture_output=True, timeout=_DOWNLOAD_S, check=False)


def _kernel_package() -> str:
    done = subprocess.run(
        ["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True, timeout=60, check=False
    )
    found = re.search(r"Depends: (linux-image-\S+)", done.stdout)
    if found is None:
        raise UnavailableError("apt knows no linux-image-amd64")
    return found[1]


@contextlib.contextmanager
def _files_of(package: Path) -> Iterator[tarfile.TarFile]:
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            yield archive


def _run(command: list[str], folder: Path, what: str) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=_DOWNLOAD_S, check=False
    )
    if done.returncode != 0:
        raise UnavailableError(f"{what} cannot be had: {_last(done.stderr)}")


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
