"""Whose turn it is to compute: all threads of a process, also one that begins or ends at that moment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sky_monarch.actors import zygote_limits

TWO_THREADS = """
import sys, threading
threading.Thread(target=sys.stdin.read).start()
print("both", flush=True)
"""


@pytest.mark.parametrize("first", ["one has begun since", "one has ended since"])
def test_threads_that_begin_or_end_meanwhile_leave_none_behind(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    look, looks = os.listdir, 0

    def changing(folder: str) -> list[str]:
        nonlocal looks
        looks += 1
        found = sorted(look(folder), key=int)
        if looks > 1:
            return found
        return found[:1] if first == "one has begun since" else [str(2**22 + 1), *found]

    with subprocess.Popen(
        [sys.executable, "-c", TWO_THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "both\n"
        monkeypatch.setattr(zygote_limits.os, "listdir", changing)
        nice = os.getpriority(os.PRIO_PROCESS, 0) + 3
        zygote_limits.take_turns(process.pid, nice)
        threads = [int(name) for name in look(f"/proc/{process.pid}/task")]
        assert len(threads) == 2
        assert [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads] == [nice, nice]
        process.communicate("")
    assert looks >= 2
