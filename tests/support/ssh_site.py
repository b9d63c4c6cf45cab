"""A real sshd on loopback, whose users have a home of the test's own, and a client configuration that leads there."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.ports import reserved
from tests.support.waiting import eventually

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
_SEPARATION = Path("/run/sshd")


@contextlib.contextmanager
def ssh_site(folder: Path, host: str) -> Iterator[Path]:
    """Serve until the block ends.

    Args:
        folder: For its files; ``folder/home`` is the home of who comes in.
        host: How the client's configuration calls it.

    Yields:
        Path of that configuration.
    """
    assert SSHD is not None
    (folder / "home").mkdir(parents=True)
    for name in ("host_key", "client_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=30
        )
    (folder / "authorized").write_bytes((folder / "client_key.pub").read_bytes())
    held = reserved()
    port: int = held.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/authorized\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
        f"SetEnv HOME={folder}/home\n"
    )
    config = folder / "ssh_config"
    config.write_text(
        f"Host {host}\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {folder}/client_key\n  IdentitiesOnly yes\n  StrictHostKeyChecking no\n"
        "  UserKnownHostsFile /dev/null\n  GlobalKnownHostsFile /dev/null\n"
    )
    made = os.geteuid() == 0 and not _SEPARATION.exists()  # where it gives its rights up, as root
    if made:
        _SEPARATION.mkdir(mode=0o755)
    log = (folder / "sshd.log").open("wb")
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=log)
    try:

        def answers() -> bool:
            assert server.poll() is None, (folder / "sshd.log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        eventually(answers, within_s=10, comes_always=True)
        yield config
    finally:
        server.terminate()
        server.wait(10)
        log.close()
        held.close()
        if made:
            with contextlib.suppress(OSError):
                _SEPARATION.rmdir()
