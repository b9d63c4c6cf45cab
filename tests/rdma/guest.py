"""A virtual machine that sees this host's files, read only, and runs one script."""

from __future__ import annotations

import shlex
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from tests.rdma.packages import Packages

#: Said on the serial console: how the script ended.
_ENDED = "SKY-GUEST-ENDED"
_BOOTED = "SKY-GUEST-BOOTED"
_LIMIT_S = 600.0

_INIT = f"""#!/bin/busybox sh
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for module in /modules/*.ko; do insmod "$module" || echo "cannot load $module"; done
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose host /host
mount --bind /proc /host/proc
mount --bind /sys /host/sys
mkdir -p /dev/shm
mount --bind /dev /host/dev
mount -t tmpfs -o mode=1777 shm /host/dev/shm
mount -t tmpfs -o mode=1777 tmp /host/tmp
cp /script /host/tmp/script
chroot /host /bin/bash /tmp/script < /dev/null
echo "{_ENDED} $?"
sync
reboot -f
"""


class Guest:
    """One machine, from its start to its end.

    Args:
        name: For what it prints.
        packages: What it is made of.
        folder: For its files; of the caller, who removes it.
        script: For bash, as root, in a copy of this host's root folder where only ``/tmp`` can be written to.
        network: Arguments of QEMU's ``-netdev``, with the id ``net``; None for none.
        hears: Called with each line that it prints, in a thread.
    """

    def __init__(
        self,
        name: str,
        packages: Packages,
        folder: Path,
        script: str,
        *,
        network: str | None = None,
        hears: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.name, self.lines = name, list[str]()
        self.booted_s: float | None = None
        self.code: int | None = None
        self._hears = hears
        initramfs = folder / f"{name}.cpio"
        initramfs.write_bytes(_initramfs(packages, script))
        command = [
            "qemu-system-x86_64",
            # KVM in a nested guest hangs without a word: never tried.
            *("-accel", "tcg", "-cpu", "max", "-m", "1536", "-smp", "1"),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"),
            *("-kernel", str(packages.kernel), "-initrd", str(initramfs)),
            *("-append", "console=ttyS0 quiet panic=-1 no_timer_check mitigations=off random.trust_cpu=on"),
            *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
            *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
        ]
        if network is not None:
            last = 1 + sum(map(ord, name)) % 250
            command += [
                "-netdev",
                network,
                "-device",
                f"virtio-net-pci,netdev=net,mac=52:54:00:00:00:{last:02x}",
            ]
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=[self._process.stdout], daemon=True)
        self._reader.start()

    def _read(self, console: IO[str]) -> None:
        for line in console:
            line = line.rstrip()
            self.lines.append(line)
            if _BOOTED in line:
                self.booted_s = time.monotonic() - self._began
            if _ENDED in line:
                self.code = int(line.rpartition(" ")[2])
            self._hears(line)

    def wait(self, limit_s: float) -> bool:
        """Whether it ended by itself within ``limit_s`` seconds, and said how; it is killed where not."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        self._reader.join(10)
        return self.code is not None

    def runs(self) -> bool:
        """Whether it has power, and time left."""
        return self._process.poll() is None and time.monotonic() - self._began < _LIMIT_S

    def kill(self) -> None:
        """Take its power away."""
        self._process.kill()
        self._process.wait(10)
        self._reader.join(10)


def script(environment: dict[str, str], commands: list[str]) -> str:
    """Sets up one RDMA device, on ``DEVICE`` with ``ADDRESS``, and runs ``commands`` up to the first failure."""
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items())
    return f"""set -eu
{exports}
echo "{_BOOTED}"
ip link set lo up
if [ "$DEVICE" = d0 ]; then ip link add d0 type dummy; fi
ip address add "$ADDRESS/24" dev "$DEVICE"
# Room for the largest RDMA packet, so that there are fewer of them.
ip link set "$DEVICE" mtu 9000 up
rdma link add rxe0 type rxe netdev "$DEVICE"
ulimit -l unlimited
cd /tmp
""" + "\n".join(commands)


def _initramfs(packages: Packages, guest_script: str) -> bytes:
    """A cpio archive, as the kernel takes it: ``newc``."""
    out = bytearray()

    def add(name: str, mode: int, data: bytes = b"") -> None:
        path = name.encode() + b"\0"
        fields = [0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0]
        out.extend(b"070701" + b"".join(b"%08X" % field for field in fields) + path)
        out.extend(bytes(-len(out) % 4))
        out.extend(data)
        out.extend(bytes(-len(out) % 4))

    for folder in ("bin", "dev", "host", "modules", "proc", "sys"):
        add(folder, 0o040755)
    add("bin/busybox", 0o100755, packages.busybox.read_bytes())
    for module in sorted(packages.modules.iterdir()):
        add(f"modules/{module.name}", 0o100644, module.read_bytes())
    add("init", 0o100755, _INIT.encode())
    add("script", 0o100644, guest_script.encode())
    add("TRAILER!!!", 0)
    return bytes(out)
