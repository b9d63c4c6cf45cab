"""The actor bench's figures and verdicts, what a process tree has cost, and that nothing of a peer outlives it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benches.actors import tree
from benches.actors.figures import BARS, IN_TURNS, NAMES, OURS, SCALE, Bar
from benches.actors.subject import ROOT, PeerError, Subject
from tests.support.waiting import eventually

_BURN = "import time\nwhile time.process_time() < {}: pass\n"
#: Has a child that burns and ends, and a grandchild whose parent ends, so that it is an orphan, which burns too.
_FAMILY = f"""
import os, subprocess, sys, time
if not os.fork():
    if not os.fork():
        exec({_BURN.format(0.1)!r})
        time.sleep(600)
    os._exit(0)
os.wait()
subprocess.run([sys.executable, "-S", "-c", {_BURN.format(0.2)!r}])
time.sleep(600)
"""
#: What the bench starts first of a peer.
_KEEPER = [sys.executable, "-S", str(ROOT / "benches/actors/keeper.py")]


#: A keeper that is told to leave when its peer is there, and the call that starts it has not returned.
_TOLD_MEANWHILE = """
import os, runpy, signal, subprocess, sys
start = subprocess.Popen
def told_meanwhile(*words, **options):
    peer = start(*words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    print(peer.pid, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    return peer
subprocess.Popen = told_meanwhile
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def gone(family):
    return not any(Path(f"/proc/{usage.pid}").exists() for usage in family)


def test_the_cost_of_a_tree_counts_its_dead_and_its_orphans_and_none_of_them_outlives_it():
    with subprocess.Popen([*_KEEPER, sys.executable, "-S", "-c", _FAMILY]) as keeper:
        try:
            # The child's 0.2 s are gone with it, were they not kept by who has waited for it.
            # On a machine with much to do a third of a second of a processor may take long.
            eventually(lambda: tree.cpu_s(keeper.pid) > 0.3, within_s=50)
            eventually(lambda: len(tree.tree(keeper.pid)) == 3, within_s=50)
            assert tree.cpu_s(keeper.pid) < 1.0
            family = tree.tree(keeper.pid)
        finally:
            keeper.terminate()
        keeper.wait(20)
    eventually(lambda: gone(family))


def test_when_the_bench_is_killed_its_peers_end_too():
    code = f"import subprocess, time; print(subprocess.Popen({[*_KEEPER, 'sleep', '600']!r}).pid, flush=True)"
    command = [sys.executable, "-S", "-c", f"{code}; time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bench:
        keeper = int(bench.stdout.readline())
        eventually(lambda: len(tree.tree(keeper)) == 2)
        family = tree.tree(keeper)
        bench.kill()
    eventually(lambda: gone(family))


def test_a_peer_whose_start_has_not_returned_ends_with_its_keeper():
    command = [sys.executable, "-S", "-c", _TOLD_MEANWHILE, _KEEPER[-1], "sleep", "600"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 143, done.stderr
    assert not Path(f"/proc/{int(done.stdout)}").exists()


def test_private_memory_grows_by_what_a_process_takes():
    before = tree.private_bytes(os.getpid())
    # Not of the heap, where memory of that size may lie about already.
    with mmap.mmap(-1, 32 << 20) as taken:
        for page in range(0, len(taken), mmap.PAGESIZE):
            taken[page] = 1
        assert tree.private_bytes(os.getpid()) - before > 0.9 * len(taken)


def test_a_peer_that_is_not_installed_is_named_with_its_fix(monkeypatch, tmp_path):
    monkeypatch.setenv("SKY_MONARCH_PEERS_PYTHON", "/nonexistent/python")
    with pytest.raises(
        PeerError, match=r"monarch is missing: there is no /nonexistent/python. Fix: make peers"
    ):
        Subject("monarch", tmp_path, 1.0)
    # Ours has neither of them, and never will.
    monkeypatch.setenv("SKY_MONARCH_PEERS_PYTHON", sys.executable)
    with pytest.raises(PeerError, match=r"monarch is missing: No module named 'monarch'. Fix: make peers"):
        Subject("monarch", tmp_path, 1.0)


def test_figures_are_of_one_operation_each():
    by_name = {figure.name: figure for figure in (*IN_TURNS, SCALE)}
    sample = {"operations": 200, "cpu_s": 0.04, "p50_us": 20.0, "p99_us": 90.0, "min_us": 15.0}
    assert by_name["rtt_call_us"].values(sample) == pytest.approx(
        {"rtt_call_us": 20, "rtt_call_us_p99": 90, "rtt_call_us_min": 15, "rtt_call_cpu_us": 200}
    )
    sample = {"operations": 1000, "cpu_s": 0.05, "wall_s": 0.1}
    assert by_name["msgs_per_s"].values(sample) == pytest.approx({"msgs_per_s": 10_000, "msgs_cpu_us": 50})
    sample = {"operations": 1, "cpu_s": 2.0, "wall_s": 1.0, "private_MiB": 30.0}
    assert by_name["scale"].values(sample) == {
        "scale_spawn_s": 1.0,
        "scale_spawn_cpu_s": 2.0,
        "scale_private_MiB": 30.0,
    }


def test_what_one_peer_alone_has_is_asked_of_no_other():
    alone = {figure.name: figure.options for figure in IN_TURNS if figure.only}
    assert {figure.only for figure in IN_TURNS} == {"", OURS}
    assert alone == {
        "payload_tensor_GBps": {"kind": "tensor", "way": "echo"},
        "payload_oneway_tensor_GBps": {"kind": "tensor", "way": "oneway"},
        "rtt_call_tls_us": {"over": "tls"},
        "fanout_tls_us": {"over": "tls"},
        "payload_oneway_tls_GBps": {"kind": "numpy", "way": "oneway", "over": "tls"},
        "payload_tensor_tls_GBps": {"kind": "tensor", "way": "echo", "over": "tls"},
    }


def test_each_bar_is_of_a_figure_that_is_measured():
    measured = {value for figure in (*IN_TURNS, SCALE) for value in figure.units}
    assert {bar.value for bar in BARS} <= measured
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize(
    ("bar", "interval", "verdict"),
    [
        (Bar(value="v", peer="p", most=0.2), (0.1, 0.19), "met"),
        (Bar(value="v", peer="p", most=0.2), (0.1, 0.21), "unsure"),
        (Bar(value="v", peer="p", most=0.2), (0.21, 0.3), "missed"),
        (Bar(value="v", peer="p", least=6), (6.1, 9), "met"),
        (Bar(value="v", peer="p", least=6), (5.9, 9), "unsure"),
        (Bar(value="v", peer="p", least=6), (3, 5.9), "missed"),
    ],
)
def test_a_bar_is_met_only_where_the_whole_interval_is_on_its_side(bar, interval, verdict):
    assert bar.verdict(*interval) == verdict
