"""What a rank writes is kept, whole and exact."""

from __future__ import annotations

import subprocess
import sys

from tests.support.runs import Workbench

WRITER = """
import os, sys
rank = int(os.environ["RANK"])
out = os.fdopen(os.dup(1), "wb", buffering=0)
for number in range(2000):
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
    for number in range(2000):
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
        assert numbers == list(range(2000))
        assert all(line.endswith("x" * 300) for line in lines if "xxx" in line)

    assert logs(workbench, "writer", "--replica", "0", "--rank", "2") == expected(2)


def test_old_output_is_rotated_away_and_the_traceback_is_kept(workbench: Workbench) -> None:
    script = workbench.folder / "loud.py"
    script.write_text(
        "for number in range(300_000):\n    print(f'{number:09d}', 'y' * 60)\nraise ValueError('the cause')\n"
    )
    job = workbench.job(
        "loud",
        run=f"{sys.executable} {script}",
        replicas=1,
        recovery={"max_restarts": 0},
        logs={"segment_mib": 1, "segments": 3},
    )
    done = workbench.cli("up", str(job), "--no-logs")
    assert done.returncode != 0
    assert "ValueError: the cause" in done.stdout + done.stderr
    size = sum(file.stat().st_size for file in (workbench.run_folder("loud") / "logs").rglob("*.log"))
    assert size <= 3.2 * 2**20
    assert workbench.cli("logs", "loud").stdout.rstrip().endswith("ValueError: the cause")


def test_tail_shows_the_last_lines(workbench: Workbench) -> None:
    job = workbench.job("tail", run="seq 1 100", replicas=1)
    assert workbench.cli("up", str(job), "--no-logs").returncode == 0
    assert workbench.cli("logs", "tail", "--tail", "3").stdout.splitlines() == [
        "[0/0] 98",
        "[0/0] 99",
        "[0/0] 100",
    ]
