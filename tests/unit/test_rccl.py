"""Who is aborted when, and what happens where an abort hangs; the communicators are SIMULATED."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchft")

from torch import distributed as dist

from sky_monarch.training.rccl import Communicator, ResilientRccl
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:TORCH_NCCL_NONBLOCKING_TIMEOUT is not set"),
]


class SimulatedGroup:
    """Stands for torch's group over a communicator."""

    def __init__(self, abort: Callable[[], None] = lambda: None) -> None:
        self.aborts = 0
        self._abort = abort

    def abort(self) -> None:
        self.aborts += 1
        self._abort()


class Scene(ResilientRccl):
    """Makes SIMULATED communicators: by ``made`` where it is set."""

    def __init__(self, **limits: timedelta) -> None:
        self.verdicts: list[str] = []
        super().__init__(give_up=self.verdicts.append, **limits)
        self.groups: list[SimulatedGroup] = []
        self.made: Callable[[], SimulatedGroup] = SimulatedGroup

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> SimulatedGroup:
        group = self.made()
        self.groups.append(group)
        return group


@pytest.fixture(scope="module")
def store() -> Iterator[dist.TCPStore]:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def join(scene: Scene, store: dist.TCPStore, quorum_id: int) -> None:
    address = f"127.0.0.1:{store.port}/{quorum_id}"
    scene.configure(address, "r0", 0, 2, quorum_id=quorum_id, global_ranks=[0, 1])


@contextmanager
def held() -> Iterator[threading.Event]:
    """An event that is set at the end, so that no thread waits for ever."""
    event = threading.Event()
    try:
        yield event
    finally:
        event.set()


def test_a_declared_death_aborts_the_communicator_once(store: dist.TCPStore) -> None:
    scene = Scene()
    join(scene, store, 5)
    scene.declare_dead(4)
    assert scene.groups[0].aborts == 0, "an older quorum's death is none of this one's"
    scene.declare_dead(5)
    scene.declare_dead(5)
    scene.cut()
    assert scene.groups[0].aborts == 1
    join(scene, store, 6)
    assert (scene.groups[0].aborts, scene.groups[1].aborts) == (1, 0)
    assert scene.verdicts == []


def test_the_old_communicator_is_aborted_before_the_next_is_made(store: dist.TCPStore) -> None:
    scene = Scene()
    join(scene, store, 1)
    scene.made = lambda: (
        SimulatedGroup() if scene.groups[0].aborts else pytest.fail("made beside the old one")
    )
    join(scene, store, 2)
    assert [group.aborts for group in scene.groups] == [1, 0]


def test_torchfts_own_abort_of_a_late_collective_goes_the_same_way(store: dist.TCPStore) -> None:
    scene = Scene()
    join(scene, store, 1)
    scene.abort()
    scene.abort()
    assert scene.groups[0].aborts == 1


def test_an_abort_that_hangs_ends_the_process_at_its_limit(store: dist.TCPStore) -> None:
    with held() as event:
        scene = Scene(abort_limit=timedelta(seconds=0.2))
        scene.made = lambda: SimulatedGroup(lambda: event.wait(30) and None)
        join(scene, store, 1)
        started = time.monotonic()
        scene.declare_dead(1)
        assert 0.2 <= time.monotonic() - started < 25, "it has not waited for the abort"
        assert scene.verdicts == ["the abort of quorum 1 has hung for 0.2 s"]


def test_an_abort_that_fails_is_as_good_as_done(store: dist.TCPStore) -> None:
    def broken() -> None:
        raise RuntimeError("the device is lost")

    scene = Scene()
    scene.made = lambda: SimulatedGroup(broken)
    join(scene, store, 1)
    scene.declare_dead(1)
    assert scene.verdicts == []


def test_a_death_frees_who_waits_for_the_dead_and_the_late_communicator_is_aborted(
    store: dist.TCPStore,
) -> None:
    with held() as event:
        scene = Scene(init_limit=timedelta(seconds=60))
        waits = threading.Event()

        def slow() -> SimulatedGroup:
            waits.set()
            event.wait(60)
            return SimulatedGroup()

        def declare() -> None:
            assert waits.wait(20)
            scene.declare_dead(7)

        scene.made = slow
        declaring = threading.Thread(target=declare)
        declaring.start()
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="a member died in it"):
            join(scene, store, 7)
        assert time.monotonic() - started < 50, "it has not waited for who does not come"
        declaring.join(5)
        assert scene.abandoned == 1
        event.set()
        eventually(lambda: scene.abandoned == 0)
        eventually(lambda: scene.groups[0].aborts == 1)
        with pytest.raises(RuntimeError, match="has a dead member"):
            join(scene, store, 7)
        scene.made = SimulatedGroup
        join(scene, store, 8)
        assert scene.groups[-1].aborts == 0


def test_a_process_with_too_many_attempts_that_hang_ends_itself(store: dist.TCPStore) -> None:
    with held() as event:
        scene = Scene(init_limit=timedelta(seconds=0.05))
        scene.made = lambda: (event.wait(30), SimulatedGroup())[1]
        for quorum_id in range(1, 5):
            with pytest.raises(RuntimeError, match="abandoned after"):
                join(scene, store, quorum_id)
        assert scene.verdicts == ["3 attempts to make a communicator hang"]
        event.set()
        eventually(lambda: scene.abandoned == 0)


def test_a_second_caller_waits_for_the_abort_of_the_first() -> None:
    with held() as event:
        done = Communicator(1, lambda: event.wait(30), limit_s=20, give_up=pytest.fail)
        first = threading.Thread(target=done.cut)
        first.start()
        second = threading.Thread(target=done.cut)
        second.start()
        second.join(0.2)
        assert second.is_alive()
        event.set()
        first.join(20)
        second.join(20)
        assert not first.is_alive()
        assert not second.is_alive()
