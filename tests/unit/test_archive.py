"""The archive of what ranks have printed: exact, bounded, counted, and what asks for it never in the way."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sky_monarch.controller import archive as module
from sky_monarch.controller.archive import Archive
from sky_monarch.controller.archive_stream import tar_of
from sky_monarch.controller.collecting import Collector, slot_of
from sky_monarch.controller.questions import Process, Questions
from sky_monarch.errors import ChannelError
from sky_monarch.launch.output import take_output

ROOM = 1 << 40
MIB = 1 << 20


def archive(folder: Path, limit_bytes: int = 64 * MIB, *, free_bytes: int = ROOM, **options: Any) -> Archive:
    return Archive(folder, limit_bytes=limit_bytes, free_bytes=lambda: free_bytes, **options)


def whole(found: Archive, slot: str, generation: int) -> bytes:
    data, offset = b"", 0
    while (kept := found.read(slot, generation, offset, 100_000)).data:
        data, offset = data + kept.data, kept.offset + len(kept.data)
    return data


def test_bytes_are_kept_exactly_and_a_second_archive_goes_on_where_the_first_was(tmp_path: Path) -> None:
    data = bytes(number * 31 % 256 for number in range(3 * MIB))
    first = archive(tmp_path)
    for at in range(0, 2 * MIB, 99_991):
        first.append("r0-1", 3, at, data[at : at + 99_991])
    second = archive(tmp_path)
    end = second.end("r0-1", 3)
    assert end == first.end("r0-1", 3)
    second.append("r0-1", 3, end - 5, data[end - 5 : end + 1000])
    assert whole(second, "r0-1", 3) == data[: end + 1000], "what is told twice is kept once"
    assert second.kept_bytes == end + 1000
    assert second.dropped_bytes == 0


def test_who_prints_most_gives_the_room_and_every_byte_is_counted(tmp_path: Path) -> None:
    found = archive(tmp_path, 2 * MIB)
    found.append("r0-0", 1, 0, b"quiet\n")
    for number in range(200):
        found.append("r1-0", 1, number * 65536, b"x" * 65536)
    on_disk = sum(path.stat().st_size for path in tmp_path.glob("logs/*/*.log"))
    assert on_disk == found.kept_bytes <= 2 * MIB
    assert found.kept_bytes + found.dropped_bytes == 200 * 65536 + 6
    assert set(found.dropped) == {"r1-0"}
    assert whole(found, "r0-0", 1) == b"quiet\n"
    assert found.read("r1-0", 1, 0, 10).offset == found.dropped["r1-0"], "the gap shows"
    found.save()
    assert archive(tmp_path, 2 * MIB).dropped == found.dropped, "also after a restart"


def test_many_short_lives_cannot_fill_the_disk_with_files(tmp_path: Path) -> None:
    found = archive(tmp_path, 64 * 4096)
    for generation in range(1, 1000):
        found.append("r0-0", generation, 0, b"born\n")
    assert len(list(tmp_path.glob("logs/r0-0/*.log"))) <= 64
    assert found.generations("r0-0")[-1] == 999


def test_what_was_never_here_is_counted_and_an_agents_own_files_are_let_alone(tmp_path: Path) -> None:
    (tmp_path / "logs" / "r7-0").mkdir(parents=True)
    own = tmp_path / "logs" / "r7-0" / "g1-000000000000.log"
    own.write_bytes(b"y" * MIB)
    found = archive(tmp_path, 128 * 1024, foreign={7})
    found.append("r0-0", 1, 1000, b"late\n")
    assert found.dropped_bytes == 1000
    assert found.read("r0-0", 1, 0, 100) == module.Kept(1000, b"late\n")
    for number in range(10):
        found.append("r0-0", 1, 1005 + number * 65536, b"x" * 65536)
    assert own.stat().st_size == MIB


def test_a_disk_that_others_fill_is_not_filled_further(tmp_path: Path) -> None:
    full = archive(tmp_path, free_bytes=1000)
    with pytest.raises(OSError, match="nearly full"):
        full.append("r0-0", 1, 0, b"x" * 5000)
    assert full.end("r0-0", 1) == 0, "it is asked for again"
    found = archive(tmp_path)
    found.append("r0-0", 1, 0, b"x" * 4 * MIB)
    tight = archive(tmp_path, free_bytes=1000)
    tight.append("r0-0", 1, 4 * MIB, b"y" * 5000)
    assert tight.kept_bytes < 4 * MIB, "old output makes room for new"


def test_the_stream_is_a_tar_file_of_the_newest_that_only_output_gets_out_of(tmp_path: Path) -> None:
    found = archive(tmp_path / "head")
    for number in range(4):
        found.append(f"r{number}-0", 1, 0, b"%d" % number * 300_000)
        time.sleep(0.02)

    async def collect() -> list[bytes]:
        return [piece async for piece in tar_of(found.newest_first(), 700_000)]

    pieces = asyncio.run(collect())
    home = tmp_path / "home"
    assert take_output(iter(pieces), home, max_bytes=10 * MIB) == 600_000
    assert sorted(path.parent.name for path in home.rglob("*.log")) == ["r2-0", "r3-0"]
    assert (home / "r3-0" / "g1-000000000000.log").read_bytes() == b"3" * 300_000

    with pytest.raises(ChannelError):
        take_output(iter(pieces[:6]), tmp_path / "cut", max_bytes=10 * MIB)
    assert list((tmp_path / "cut").rglob("*.log")), "what has arrived stays"
    for name in ("../evil/g1-000000000000.log", "/r0-0/g1-0.log", "r0-0/../../x.log", "r0-0/private.json"):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            entry = tarfile.TarInfo(name)
            entry.size = 1
            tar.addfile(entry, io.BytesIO(b"x"))
        with pytest.raises(ChannelError, match="no output"):
            take_output(iter([buffer.getvalue()]), tmp_path / "evil", max_bytes=MIB)
    assert not (tmp_path / "evil").exists()


class Host:
    """Agents of one host, as the collector sees them: answers at once, and counts what is asked."""

    def __init__(self) -> None:
        self.logs: dict[tuple[int, int], bytes] = {}
        self.begins: dict[tuple[int, int], int] = {}
        self.complete: set[tuple[int, int]] = set()
        self.asked: list[tuple[int, int, int]] = []
        self.under_way = self.most_under_way = 0
        self.delay_s = 0.0
        self.gone: set[int] = set()
        self.questions = Questions(
            self.send,
            lambda process, generation: None if generation in self.gone else (process.host, generation),
        )

    def send(self, host: str, command: Mapping[str, Any]) -> bool:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        asyncio.get_running_loop().call_later(self.delay_s, self._answer, host, dict(command))
        return True

    def _answer(self, host: str, question: dict[str, Any]) -> None:
        self.under_way -= 1
        key = (question["slot"]["replica"], question["generation"])
        self.asked.append((*key, question["offset"]))
        text, first = self.logs.get(key, b""), self.begins.get(key, 0)
        at = min(max(question["offset"], first), first + len(text))
        data = text[at - first :][: question["max_bytes"]]
        eof = (key in self.complete or key not in self.logs) and at + len(data) >= first + len(text)
        answer = {"request": question["request"], "offset": at, "data": data, "eof": eof}
        self.questions.answered(host, answer)

    def processes_on(self, host: str) -> list[Process]:
        return [Process(host, replica, 0) for replica in sorted({replica for replica, _ in self.logs})]

    def generations(self, process: Process) -> tuple[int, ...]:
        return tuple(sorted(number for replica, number in self.logs if replica == process.replica))

    def is_archived(self, process: Process) -> bool:
        return True


@pytest.fixture
def host() -> Iterator[Host]:
    return Host()


def collected(
    host: Host, folder: Path, *, within_s: float = 10.0, **options: Any
) -> tuple[Archive, list[str]]:
    """Collects until all is there."""
    found, notices = archive(folder, **options), []

    async def work() -> None:
        collector = Collector(
            found,
            host.questions,
            host,
            notice=lambda process, gone: notices.append(f"{slot_of(process)} {gone}"),
        )
        collector.connected("a")
        since_s = asyncio.get_running_loop().time()
        async with asyncio.timeout(within_s):
            while not collector.has_all(since_s):
                await asyncio.sleep(0.01)
        collector.close()

    asyncio.run(work())
    return found, notices


def test_all_that_ranks_print_is_fetched_one_question_at_a_time(host: Host, tmp_path: Path) -> None:
    host.logs = {(0, 1): b"first\n" * 50_000, (0, 2): b"second\n", (1, 1): b"other\n" * 50_000}
    host.complete = {(0, 1)}
    host.delay_s = 0.001
    found, notices = collected(host, tmp_path)
    for (replica, generation), text in host.logs.items():
        assert whole(found, f"r{replica}-0", generation) == text
    assert host.most_under_way == 1
    assert notices == []
    between = [replica for replica, _, _ in host.asked]
    assert set(between[: len(between) // 2 + 17]) == {0, 1}, "a rank that prints much holds nobody up"


def test_what_an_agent_has_rotated_away_is_counted_and_told_once(host: Host, tmp_path: Path) -> None:
    host.logs, host.begins = {(0, 1): b"y" * 200_000}, {(0, 1): 5_000_000}
    found, notices = collected(host, tmp_path)
    assert found.dropped == {"r0-0": 5_000_000}
    assert notices == ["r0-0 5000000"]
    assert found.end("r0-0", 1) == 5_200_000


def test_a_successor_goes_on_from_the_newest_that_is_here(host: Host, tmp_path: Path) -> None:
    host.logs = {(0, number): b"life %d\n" % number for number in range(1, 200)}
    host.complete = {(0, number) for number in range(1, 199)}
    archive(tmp_path).append("r0-0", 197, 0, b"life 197\n")
    found, _ = collected(host, tmp_path)
    assert min(generation for _, generation, _ in host.asked) == 197, "not asked for what there was before"
    assert found.end("r0-0", 199) == len(b"life 199\n")


def test_a_generation_that_never_ends_hides_none_after_it(host: Host, tmp_path: Path) -> None:
    host.logs = {(0, number): b"life %d\n" % number for number in range(1, 41)}
    host.complete = {(0, number) for number in range(1, 40)} - {(0, 3), (0, 11)}
    found, _ = collected(host, tmp_path)
    assert found.generations("r0-0") == tuple(range(1, 41))


def test_a_life_that_no_agent_knows_any_more_holds_up_nothing(host: Host, tmp_path: Path) -> None:
    host.logs = {(0, 1): b"gone\n", (0, 2): b"there\n", (1, 2): b"other\n"}
    host.gone = {1}
    archive(tmp_path).append("r0-0", 1, 0, b"gone")
    found, _ = collected(host, tmp_path)
    assert [whole(found, "r0-0", number) for number in (1, 2)] == [b"gone", b"there\n"]
    assert whole(found, "r1-0", 2) == b"other\n"


def test_output_takes_no_more_than_its_share_of_the_line(host: Host, tmp_path: Path) -> None:
    host.logs = {(0, 1): b"z" * 3 * MIB}
    began = time.monotonic()

    async def work() -> None:
        collector = Collector(
            archive(tmp_path), host.questions, host, notice=lambda process, gone: None, bytes_per_s=4 * MIB
        )
        collector.connected("a")
        async with asyncio.timeout(10):
            while collector.archive.end("r0-0", 1) < 3 * MIB:
                await asyncio.sleep(0.01)
        collector.close()

    asyncio.run(work())
    assert time.monotonic() - began > 0.6


def test_a_disk_that_takes_nothing_ends_nothing_and_is_tried_again(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sky_monarch.controller.collecting._DISK_AGAIN_S", 0.05)
    host.logs = {(0, 1): b"late but here\n"}
    real, times = Archive.append, []

    def refuse(self: Archive, *arguments: Any) -> None:
        times.append(time.monotonic())
        if len(times) < 3:
            raise OSError(28, "no space")
        real(self, *arguments)

    monkeypatch.setattr(Archive, "append", refuse)
    found, _ = collected(host, tmp_path)
    assert whole(found, "r0-0", 1) == b"late but here\n"
    assert len(times) == 3
