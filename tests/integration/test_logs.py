"""What a rank writes is kept, whole and exact."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.runs import Workbench
from tests.support.waiting import eventually

WRITER = """
import os, sys
rank = int(os.environ["RANK"])
out = os.fdopen(os.dup(1), "wb", buffering=0)
for number in range(600):
    line = f"{rank} {number} ".encode() + b"x" * 300
    if number % 100 == 7:
        out.write(line[:50]); out.write(line[50:] + b"\\n")
    elif number % 100 == 8:
        out.write(b"bar 10%\\rbar 20%\\r" + line + b"\\n")
    elif number % 100 == 9:
        out.write(b"\\xff\\xfe bad " + line + b"\\n")
    else:
        out.write(line + b"\\n")
out.write(b"no newline at the end")
"""


def logs(workbench: Workbench, *arguments: str) -> bytes:
    """What ``sky-monarch logs`` prints, byte for byte."""
    command = [sys.executable, "-m", "sky_monarch", "logs", *arguments]
    return subprocess.run(command, env=workbench.env, capture_output=True, timeout=60, check=True).stdout


def expected(rank: int) -> bytes:
    """What the writer of that rank wrote."""
    whole = b""
    for number in range(600):
        line = f"{rank} {number} ".encode() + b"x" * 300
        if number % 100 == 8:
            whole += b"bar 10%\rbar 20%\r"
        elif number % 100 == 9:
            whole += b"\xff\xfe bad "
        whole += line + b"\n"
    return whole + b"no newline at the end"


def test_no_line_is_torn_or_lost_and_one_rank_reads_byte_exact(workbench: Workbench) -> None:
    script = workbench.folder / "writer.py"
    script.write_text(WRITER)
    job = workbench.job("writer", run=f"{sys.executable} {script}", replicas=1, ranks_per_replica=4)
    assert workbench.cli("up", str(job), "--no-logs").returncode == 0

    merged = logs(workbench, "writer").decode(errors="replace").split("\n")
    for rank in range(4):
        prefix = f"[0/{rank}] "
        lines = [line.removeprefix(prefix) for line in merged if line.startswith(prefix)]
        numbers = [int(line.split(f"{rank} ", 1)[1].split()[0]) for line in lines if "xxx" in line]
        assert numbers == list(range(600))
        assert all(line.endswith("x" * 300) for line in lines if "xxx" in line)

    assert logs(workbench, "writer", "--replica", "0", "--rank", "2") == expected(2)


# 200 MB in lines of 100 bytes.
LINES = 2_000_000
LOUD = f"""
import sys
for first in range(0, {LINES}, 1000):
    sys.stdout.write("".join(f"{{number:09d}} {{'y' * 89}}\\n" for number in range(first, first + 1000)))
raise ValueError("the cause")
"""


def peak_mib(pid: int) -> float:
    """The most that a process ever had resident."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0


def size_of(file: Path) -> int:
    """In bytes; 0 of one that is being rotated away this moment."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


@pytest.mark.slow
def test_old_output_is_rotated_away_and_the_traceback_is_kept(workbench: Workbench) -> None:
    script = workbench.folder / "loud.py"
    script.write_text(LOUD)
    job = workbench.job(
        "loud",
        run=f"{sys.executable} {script}",
        replicas=1,
        recovery={"max_restarts": 0},
        logs={"segment_mib": 1, "segments": 3},
    )
    name = workbench.up(job)
    status = eventually(
        lambda: (now := workbench.status(name)) and now["controller_pid"] and now["agent_pid"] and now
    )
    logs, peaks_mib = workbench.run_folder(name) / "logs", {}

    def over() -> bool:
        for who in ("controller_pid", "agent_pid"):
            peaks_mib[who] = max(peaks_mib.get(who, 0.0), peak_mib(status[who]))
        size = sum(size_of(file) for file in list(logs.rglob("*.log")))
        assert size <= 4.2 * 2**20, "one more segment than are kept, for the moment of the change"
        return workbench.status(name)["state"] == "FAILED"

    eventually(lambda: over() or None, within_s=60)
    assert workbench.wait_for_end(name)["exit_code"] != 0
    size = sum(file.stat().st_size for file in logs.rglob("*.log"))
    assert size <= 3.2 * 2**20
    assert all(0 < peak < 150 for peak in peaks_mib.values()), (
        f"memory does not grow with the output: {peaks_mib}"
    )
    assert "ValueError: the cause" in workbench.cli("status", name).stdout
    log = workbench.cli("logs", name).stdout.rstrip()
    assert log.endswith("ValueError: the cause")
    assert f"{LINES - 1:09d} yyy" in log, "the last of the output before it"


def test_tail_shows_the_last_lines(workbench: Workbench) -> None:
    job = workbench.job("tail", run="seq 1 100", replicas=1)
    assert workbench.cli("up", str(job), "--no-logs").returncode == 0
    assert workbench.cli("logs", "tail", "--tail", "3").stdout.splitlines() == [
        "[0/0] 98",
        "[0/0] 99",
        "[0/0] 100",
    ]
