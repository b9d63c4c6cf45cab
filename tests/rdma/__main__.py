"""The stage ``make test-rdma``: the RDMA tests of the Rust core in one guest, then over two.

Prints what failed, and one line at the end; exits 0 where all held, or where no machine can be had, which it says.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.rdma.guest import Guest, script
from tests.rdma.packages import Packages, UnavailableError

REPO = Path(__file__).parents[2]
_TESTS = "rdma::verbs::rxe_tests"
_KILL = "SKY-GUEST-KILL-THE-OTHER"
_LIMIT_S = 600.0
#: A defect of ours, and the test that it has to turn red: else that test shows nothing.
_MUTANTS = {
    "ignore_epoch": "what_the_owner_does_not_allow_is_refused_by_its_kind",
    "lend_all_rights": "a_key_opens_nothing_but_what_it_was_lent_for_and_a_failed_pair_is_flushed",
}


def _built() -> Path:
    """The Rust tests, with the defects compiled in that ``SKY_MONARCH_MUTANT`` chooses; built on this host."""
    command = ["cargo", "test", "--package", "sky-monarch-core", "--lib", "--features", "mutants", "--no-run"]
    done = subprocess.run(
        [*command, "--message-format", "json"], cwd=REPO, stdout=subprocess.PIPE, text=True, check=False
    )
    double = ["cargo", "build", "--quiet", "--package", "sky-monarch-double-hip"]
    if done.returncode != 0 or subprocess.run(double, cwd=REPO, check=False).returncode != 0:
        sys.exit("error: the tests do not build")
    messages = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    executables = [message["executable"] for message in messages if message.get("executable")]
    return Path(executables[-1])


def _environment(packages: Packages, number: int, device: str) -> dict[str, str]:
    return {
        **packages.environment(),
        "DEVICE": device,
        "ADDRESS": f"10.9.0.{number}",
        "SKY_MONARCH_TEST_RDMA_ADDRESS": f"10.9.0.{number}",
        "SKY_MONARCH_TEST_RDMA_PEER": "10.9.0.1",
        # For memory of an accelerator; what the NIC says of it is the kernel's.
        "SKY_MONARCH_TEST_SIMULATED_GPU": "1",
        "SKY_MONARCH_HIP_LIB": str(REPO / "target/debug/libamdhip64.so"),
        "RUST_BACKTRACE": "0",
        "HOME": "/tmp",
    }


def _passed(guest: Guest) -> int:
    return sum(int(found[1]) for line in guest.lines if (found := re.search(r"(\d+) passed", line)))


def _show(guest: Guest) -> None:
    sys.stdout.write("".join(f"[{guest.name}] {line}\n" for line in guest.lines))


def _one_guest(packages: Packages, tests: Path, folder: Path) -> Guest:
    """Everything with owner and requester in one guest; then the defects, each of which has to be found."""
    run = f"{shlex.quote(str(tests))} --ignored --test-threads 1"
    commands = [f"{run} --nocapture --skip child_ {_TESTS}::one_guest"]
    for mutant, test in _MUTANTS.items():
        alone = f"{run} --exact {_TESTS}::one_guest::{test}"
        # 101: a test failed. Anything else would be another failure than the one that is wanted.
        commands.append(f"code=0; SKY_MONARCH_MUTANT={mutant} {alone} > /tmp/out 2>&1 || code=$?")
        commands.append("grep panicked /tmp/out || true")
        unfound = f'{{ cat /tmp/out; echo "the defect {mutant} was not found"; exit 9; }}'
        commands.append(f'[ "$code" = 101 ] || {unfound}')
        commands.append(f'echo "the defect {mutant} was found"')
    guest = Guest("alone", packages, folder, script(_environment(packages, 1, "d0"), commands))
    try:
        guest.wait(_LIMIT_S)
    finally:
        guest.kill()
    return guest


def _two_guests(packages: Packages, tests: Path, folder: Path) -> tuple[Guest, Guest]:
    """Owner and requester in a guest each; at the end the owner's power goes."""
    cable = folder / "cable"
    run = f"{shlex.quote(str(tests))} --ignored --nocapture --exact {_TESTS}::two_guests::"
    kill = threading.Event()
    owner = Guest(
        "owner",
        packages,
        folder,
        script(_environment(packages, 1, "eth0"), [run + "owner"]),
        network=f"stream,id=net,server=on,addr.type=unix,addr.path={cable}",
    )
    try:
        until = time.monotonic() + 20
        while not cable.exists() and time.monotonic() < until:
            time.sleep(0.05)
        requester = Guest(
            "requester",
            packages,
            folder,
            script(_environment(packages, 2, "eth0"), [run + "requester"]),
            network=f"stream,id=net,server=off,addr.type=unix,addr.path={cable}",
            hears=lambda line: kill.set() if _KILL in line else None,
        )
        try:
            while requester.runs() and not kill.wait(0.2):
                pass
            # In the middle of something.
            time.sleep(0.5)
            owner.kill()
            requester.wait(_LIMIT_S)
        finally:
            requester.kill()
    finally:
        owner.kill()
    return owner, requester


def main() -> int:
    began = time.monotonic()
    packages = Packages(REPO / "build/rdma")
    try:
        packages.ensure()
    except (UnavailableError, subprocess.TimeoutExpired) as error:
        print(f"SKIPPED: make test-rdma: {error}", flush=True)
        return 0
    tests = _built()
    built_s = time.monotonic() - began
    with tempfile.TemporaryDirectory(prefix="sky-monarch-rdma-") as temporary:
        folder = Path(temporary)
        alone = _one_guest(packages, tests, folder)
        _show(alone)
        owner, requester = _two_guests(packages, tests, folder)
        _show(owner)
        _show(requester)
    # The owner of the two loses its power: it ends with nothing.
    failed = [guest for guest in (alone, requester) if guest.code != 0]
    if failed:
        ends = ", ".join(f"{guest.name} ended with {guest.code}" for guest in failed)
        print(f"FAILED: make test-rdma: {ends} (of none: not in {_LIMIT_S:.0f} s)", flush=True)
        return 1
    took_s = time.monotonic() - began
    print(
        f"test-rdma: RoCE v2 (rdma_rxe): {_passed(alone)} passed in one guest, {_passed(requester)} over two; "
        f"{len(_MUTANTS)} defects found; booted in {alone.booted_s or 0:.0f} s, {took_s:.0f} s in all "
        f"({built_s:.0f} s to build)",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
