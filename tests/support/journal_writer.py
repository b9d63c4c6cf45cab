"""Takes a journal of the first version up, each time killed at the next operation on its disk; see test_journal.

``python -m tests.support.journal_writer FOLDER torn|whole``, with that journal in ``FOLDER/old.db``: prints for
each life how many events were said to be stored, how many of them the journal then has, and whether it has them
whole.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path

from sky_monarch.controller.journal import Journal, read_events

TRANSACTIONS = 4
EACH = 2


def live(path: Path, acks: int) -> None:
    """One life, with everything that a controller does to a journal."""
    journal = Journal(path, keep_events=5)
    number = journal.last_seq(7)
    for turn in range(TRANSACTIONS):
        with journal.transaction(durable=turn == 2):
            for _ in range(EACH):
                number += 1
                journal.append({"event": "n", "wall_ms": 1, "incarnation": 7, "seq": number, "t": "x" * 300})
        os.write(acks, f"{number}\n".encode())
        if turn % 2:
            journal.compact({"number": number})
            # What its own thread does in a controller.
            journal._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
    journal.close()


def main(folder: Path, *, torn: bool) -> int:
    """Kill a life at its first operation, the next one at its second, until one comes to its end."""
    Journal._checkpoint = lambda _: None  # type: ignore[assignment,method-assign]
    disk, path, nth = ctypes.CDLL(None), folder / "journal.db", int(torn)
    while True:
        for left in folder.glob("journal.db*"):
            left.unlink()
        shutil.copy(folder / "old.db", path)
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            disk.disk_arm(ctypes.c_long(nth), int(torn))
            live(path, writer)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as acks:
            said = max([4, *(int(line) for line in acks)])  # the old one has those up to 4
        status = os.waitpid(pid, 0)[1]
        seqs = [event["seq"] for event in read_events(path) if "seq" in event]
        whole = seqs == list(range(seqs[0], seqs[-1] + 1)) and (seqs[-1] - 4) % EACH == 0
        journal = Journal(path, keep_events=5)  # and the next one can write it
        summary = journal.summary()
        known = summary is None or summary[1]["number"] <= seqs[-1]
        with journal.transaction():
            journal.append({"event": "n", "wall_ms": 1, "incarnation": 7, "seq": seqs[-1] + 1})
        journal.close()
        print(nth, said, seqs[-1], int(whole and known), flush=True)
        if os.WIFEXITED(status):
            return os.WEXITSTATUS(status)
        nth += 2  # the other half is met the other way


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), torn=sys.argv[2] == "torn"))
