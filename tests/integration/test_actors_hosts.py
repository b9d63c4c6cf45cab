"""Actors on several hosts: real host processes on this machine, which talk over TLS."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from sky_monarch.actor import (
    ActorKeys,
    HostListener,
    SupervisionError,
    attach_to_hosts,
    local_hosts,
    shutdown,
    this_host,
)
from sky_monarch.actor_host import make_keys
from sky_monarch.errors import ConfigError, LaunchError, PeerRefusedError
from tests.support.actors import Caller, Echo, FarOwner, Plain, Teller
from tests.support.processes import children_of, is_alive, parent_of, with_variable
from tests.support.served import Served
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("actors_end")

LIMIT_S = 30
ROOT = Path(__file__).parents[2]


def server_of(pid: int) -> int:
    """The process that serves the host of ``pid``: the parent of its zygote."""
    return parent_of(parent_of(pid))


def test_two_hosts_are_one_mesh_of_processes_and_talk_to_each_other_and_to_this_one():
    np = pytest.importorskip("numpy")
    hosts = local_hosts(2)
    assert hosts.names == ["local-0", "local-1"]
    procs = hosts.spawn_procs({"gpus": 2})
    mesh = procs.spawn("echo", Echo)

    assert dict(mesh.extent) == {"hosts": 2, "gpus": 2}
    pids = mesh.pid.call().get(LIMIT_S)
    assert len(set(pids.values())) == 4
    servers = [server_of(pids.item(hosts=host, gpus=gpu)) for host in (0, 1) for gpu in (0, 1)]
    assert servers[0] == servers[1] != servers[2] == servers[3], "two on each host"
    where = mesh.where.call().get(LIMIT_S).item(hosts=1, gpus=0)
    assert where == (2, {"hosts": 1, "gpus": 0}, {"hosts": 2, "gpus": 2})
    one = mesh.slice(hosts=1, gpus=1)
    assert one.pid.call_one().get(LIMIT_S) == pids.item(hosts=1, gpus=1)
    assert sorted(answer.get(LIMIT_S) for answer in mesh.pid.stream()) == sorted(pids.values())

    array = np.arange(3_000_000, dtype=np.int32)
    assert (one.echo.call_one(array).get(LIMIT_S) == array).all()

    for number in range(50):
        mesh.hear.broadcast(number)
        one.hear.broadcast(-number)
    heard = one.all_heard.call_one().get(LIMIT_S)
    assert heard == [value for number in range(50) for value in (number, -number)], "in the sender's order"

    here = this_host().spawn_procs().spawn("here", Caller)
    there = procs.slice(hosts=0, gpus=0).spawn("there", Caller)
    assert there.ask.call_one(one, "from host to host").get(LIMIT_S) == "from host to host"
    assert here.ask.call_one(one, "from here").get(LIMIT_S) == "from here"
    assert there.ask.call_one(here, "to here").get(LIMIT_S) == "to here"


def test_a_dead_rank_of_another_host_is_told_and_comes_back_in_its_place(failures, shown):
    procs = local_hosts(2).spawn_procs({"gpus": 1}, name="trainers")
    mesh = procs.spawn("trainer", Echo)
    pids = list(mesh.pid.call().get(LIMIT_S).values())

    with pytest.raises(
        SupervisionError, match=r"trainer\[1\] is dead: trainers\[1\].* on local-1, pid \d+: exited"
    ):
        mesh.slice(hosts=1).say_and_die.call_one("no more memory").get(LIMIT_S)
    eventually(lambda: failures)
    (failure,) = failures
    assert (failure.host, failure.rank, failure.pid) == ("local-1", 1, pids[1])
    assert "no more memory" in failure.last_lines
    eventually(lambda: "[trainers[1]] no more memory\n" in shown.text, what="it is shown here")

    mesh.respawn(1)

    again = list(mesh.pid.call().get(LIMIT_S).values())
    assert again[0] == pids[0]
    assert again[1] != pids[1]
    assert len(failures) == 1


def test_a_lost_host_is_one_report_that_names_it_and_the_end_of_all_that_ran_there(failures):
    mesh = local_hosts(2).spawn_procs({"gpus": 2}, name="trainers").spawn("trainer", Echo)
    pids = list(mesh.pid.call().get(LIMIT_S).values())
    pending = mesh.slice(hosts=1).echo_later.call("late", after_s=60)
    time.sleep(0.1)

    os.kill(server_of(pids[2]), signal.SIGKILL)

    with pytest.raises(SupervisionError, match="local-1 is lost"):
        pending.get(LIMIT_S)
    eventually(lambda: failures)
    eventually(lambda: not is_alive(pids[2]) and not is_alive(pids[3]), what="all there ends")
    (failure,) = failures
    assert (failure.host, failure.crashed_ranks) == ("local-1", (2, 3))
    assert "trainers[2, 3] (actors: trainer) on local-1: local-1 is lost" in failure.report()
    assert list(mesh.slice(hosts=0).pid.call().get(LIMIT_S).values()) == pids[:2], "the other host goes on"
    with pytest.raises(LaunchError, match="local-1"):
        mesh.respawn(2)


@pytest.mark.slow
def test_a_broadcast_to_a_dead_process_of_another_host_raises(failures):
    hosts = local_hosts(2)
    mesh = hosts.spawn_procs(name="trainers").spawn("trainer", Echo)
    other = hosts.slice(hosts=0).spawn_procs(name="teller").spawn("teller", Teller)
    pids = list(mesh.pid.call().get(LIMIT_S).values())
    os.kill(pids[1], signal.SIGKILL)
    eventually(lambda: failures)

    with pytest.raises(SupervisionError, match=r"trainer\[1\] is dead"):
        mesh.hear.broadcast("the death is known here")
    raised = eventually(
        lambda: other.tell.call_one(mesh.slice(hosts=1), 50).get(LIMIT_S),
        what="who does not know of it is told",
    )
    assert "is dead: " in raised
    assert "nobody answers" in raised

    mesh.respawn(1)
    mesh.hear.broadcast("all hear it again")
    heard = list(mesh.all_heard.call().get(LIMIT_S).values())
    assert heard[1] == ["all hear it again"]
    assert heard[0] == ["the death is known here", "all hear it again"], "the living are told all the same"


@pytest.mark.slow
def test_an_actor_owns_what_it_has_spawned_on_another_host(failures):
    hosts = local_hosts(2)
    owner = hosts.slice(hosts=0).spawn_procs(name="owner").spawn("owner", FarOwner)
    pids = owner.start.call_one(hosts.slice(hosts=1), 2).get(LIMIT_S)

    os.kill(pids[1], signal.SIGKILL)

    told = eventually(lambda: owner.told.call_one().get(LIMIT_S))
    assert [(failure.host, failure.rank) for _, failure in told] == [("local-1", 1)]
    assert not failures, "it was handled"
    owner.bring_back.call_one(1).get(LIMIT_S)
    again = owner.all_pids.call_one().get(LIMIT_S)
    assert again[0] == pids[0]
    os.kill(owner.pid.call_one().get(LIMIT_S), signal.SIGKILL)
    eventually(lambda: not any(map(is_alive, again)), what="what a dead owner had there is gone")


@pytest.fixture
def folder():
    """Where the program puts its sockets. Short: a socket's path has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="smt-") as name:
        yield Path(name)


PROGRAM = """
import sys, time
from sky_monarch.actor import local_hosts
from tests.support.actors import Owner
owners = local_hosts(2).spawn_procs().spawn("owner", Owner)
for pids in owners.start.call(1).get(60).values():
    print(*pids, flush=True)
print("ready", flush=True)
if sys.argv[1] != "end":
    time.sleep(600)
"""


@pytest.mark.parametrize(
    "how", ["kill", *(pytest.param(how, marks=pytest.mark.slow) for how in ("interrupt", "end"))]
)
def test_nothing_on_other_hosts_outlives_the_program(how, folder):
    mark = f"{os.getpid()}-hosts-{how}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ACTORS_TEST_MARK": mark, "TMPDIR": str(folder)}
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how],
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None
    try:
        lines = [program.stdout.readline().strip() for _ in range(3)]
        assert lines[2] == "ready", lines
        there = len(list(folder.glob("sky-monarch-*/gateway")))
        assert there == 3 or how == "end", "a gateway a host"
        if how != "end":
            os.kill(program.pid, {"kill": signal.SIGKILL, "interrupt": signal.SIGINT}[how])
        program.wait(LIMIT_S)
        eventually(lambda: not with_variable("ACTORS_TEST_MARK", mark), what="all are gone")
        eventually(lambda: not list(folder.iterdir()), what="the folders of sockets are gone")
        assert not any(is_alive(int(pid)) for pid in lines[0].split() + lines[1].split())
    finally:
        if program.poll() is None:
            program.kill()
            program.wait()
        program.stdout.close()


@pytest.fixture
def keys(tmp_path):
    make_keys(str(tmp_path / "keys"), 2)
    return tmp_path / "keys"


@pytest.mark.slow
def test_hosts_that_somebody_started_are_attached_to_and_serve_one_program_after_the_other(keys):
    hosts = [Served(keys / f"host-{number}.key") for number in range(2)]
    try:
        for _ in range(2):
            mesh = attach_to_hosts([host.address for host in hosts], keys=keys / "client.key")
            assert mesh.names == ["host-0", "host-1"]
            echo = mesh.spawn_procs().spawn("echo", Plain)
            pids = list(echo.pid.call().get(LIMIT_S).values())
            assert len(set(pids)) == 2
            shutdown()
            eventually(lambda pids=pids: not any(map(is_alive, pids)), what="they end with the program")
        with pytest.raises(ConfigError, match=r"these keys are of actor-host"):
            attach_to_hosts([hosts[0].address], keys=keys / "host-0.key")
        stranger, _ = ActorKeys.create(1)
        with pytest.raises(PeerRefusedError):
            attach_to_hosts([hosts[0].address], keys=stranger, timeout=10)
    finally:
        said = "".join(host.end() for host in hosts)
    secret = (keys / "host-0.key").read_text().strip()
    assert secret not in said
    assert "PRIVATE KEY" not in said
    assert said.count(" has ended\n") == 4, "two programs ended, and each host says so"
    assert "is lost" not in said, "an orderly end is no loss"


ATTACHED = """
import sys, time
from sky_monarch.actor import attach_to_hosts
print(*attach_to_hosts(sys.argv[1:2], keys=sys.argv[2]).names, flush=True)
time.sleep(600)
"""


def test_a_killed_program_that_only_attached_leaves_no_folder(keys, folder):
    host = Served(keys / "host-0.key")
    program = subprocess.Popen(
        [sys.executable, "-c", ATTACHED, host.address, str(keys / "client.key")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    try:
        assert program.stdout.readline() == "host-0\n"
        assert list(folder.iterdir())
        program.kill()
        program.wait(LIMIT_S)
        eventually(lambda: not list(folder.iterdir()), what="the folders of sockets are gone")
    finally:
        program.kill()
        program.communicate()
        host.end()


ENDED_WHILE_IT_CLOSES = """
import os, signal, sys, time
from sky_monarch.actor_host import serve_host
from sky_monarch.actors.runtime import Runtime
close = Runtime.close
def slow(runtime):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    close(runtime)
Runtime.close = slow
serve_host(listen="127.0.0.1:0", dial=None, keys=sys.argv[1], name=None, once=True, within_s=0.1)
"""


def test_a_host_that_is_ended_while_it_closes_leaves_nothing(keys, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ENDED_WHILE_IT_CLOSES, str(keys / "host-0.key")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 143, done.stderr
    assert not list(tmp_path.glob("sky-monarch-*"))


@pytest.mark.slow
def test_the_command_makes_keys_that_nobody_else_can_read(tmp_path):
    folder = tmp_path / "keys"
    argv = [sys.executable, "-m", "sky_monarch", "actor-keys", str(folder), "--hosts", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    made = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    names = ("client", "host-0", "host-1")
    assert made.splitlines() == [str(folder / f"{name}.key") for name in names]
    assert [(folder / f"{name}.key").stat().st_mode & 0o777 for name in names] == [0o600] * 3
    again = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "client.key is there already" in again.stderr


def test_keys_that_others_can_read_or_that_are_none_are_refused(keys, tmp_path, monkeypatch):
    (keys / "client.key").chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        attach_to_hosts(["127.0.0.1:1"], keys=keys / "client.key")
    monkeypatch.delenv("ACTOR_KEYS", raising=False)
    with pytest.raises(ConfigError, match="no keys were given"):
        attach_to_hosts(["127.0.0.1:1"])
    (tmp_path / "none.key").touch(0o600)
    with pytest.raises(ConfigError, match="holds no keys"):
        attach_to_hosts(["127.0.0.1:1"], keys=tmp_path / "none.key")
    with pytest.raises(ConfigError, match="each of which is there once"):
        attach_to_hosts([], keys=keys / "client.key")


def test_a_host_that_does_not_answer_is_named(keys):
    with pytest.raises(LaunchError, match=r"127\.0\.0\.1:1 does not answer"):
        attach_to_hosts(["127.0.0.1:1"], keys=keys / "client.key", timeout=0.3)
    with pytest.raises(ConfigError, match="attached to hosts already"):
        HostListener("127.0.0.1:0", keys=keys / "client.key")


LAUNCHING = """
import sky_monarch as sm
from tests.support.actors import Plain
hosts = sm.launch_hosts(2, name="actors", timeout=60)
pids = hosts.spawn_procs({"gpus": 2}).spawn("plain", Plain).pid.call().get(60)
print(*hosts.names, *pids.values(), flush=True)
raise SystemExit("the program fails")
"""


@pytest.mark.slow
def test_hosts_are_launched_as_a_job_which_ends_with_the_program(workbench):
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHING],
        env=workbench.env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    first, second, *pids = done.stdout.split()
    assert (first, second, len(set(pids))) == ("actors-0", "actors-1", 4)
    workbench.names.append("actors")
    assert workbench.wait_for_end("actors")["state"] == "SUCCEEDED"
    assert not any(is_alive(int(pid)) for pid in pids)
    folder = next((workbench.home / "runs").iterdir())
    kept = [path for path in folder.rglob("*") if path.is_file() and path.name != "private.json"]
    begin = base64.b64encode(b'{"name": "actor-host", "ca_pem":')[:40]
    assert not any(begin in path.read_bytes() for path in kept), "no keys in what the run leaves"


LETTING_GO = """
import os, queue, signal, sys, time
import sky_monarch as sm
import sky_monarch.actor as face
from tests.support.actors import Plain
from tests.support.processes import parent_of
heard = queue.SimpleQueue()
face.unhandled_fault_hook = heard.put
with sm.launch_hosts(2, name="actors", timeout=60) as hosts:
    mesh = hosts.spawn_procs({"gpus": 2}).spawn("plain", Plain)
    pids = list(mesh.pid.call().get(60).values())
    os.kill(parent_of(parent_of(pids[3])), signal.SIGKILL)
    while True:
        try:
            mesh.pid.call().get(60)
        except sm.actor.SupervisionError:
            break
    failure = heard.get(timeout=30)
    print("lost", failure.host, failure.crashed_ranks, flush=True)
    mesh.respawn([2, 3], timeout=60)
    again = list(mesh.pid.call().get(60).values())
    print("again", again[:2] == pids[:2], len(set(again) | set(pids)), *hosts.names, flush=True)
    try:
        hosts.slice(hosts=0).stop()
    except sm.ConfigError as error:
        print(error, flush=True)
print("over", *(pid for pid in pids + again if os.path.exists(f"/proc/{pid}")), flush=True)
assert heard.empty(), "one loss is told once"
"""


@pytest.mark.slow
def test_a_launched_host_that_is_lost_is_had_again_and_with_the_block_all_of_them_end(workbench):
    workbench.names.append("actors")
    done = subprocess.run(
        [sys.executable, "-c", LETTING_GO],
        env=workbench.env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "lost actors-1 (2, 3)",
        "again True 6 actors-0 actors-1",
        "these hosts are a part of what was launched together",
        "over",
    ]
    assert workbench.status("actors")["state"] == "SUCCEEDED", "it has ended before the block was left"
    assert "actors has ended" in done.stderr


@pytest.mark.slow
def test_ctrl_c_while_hosts_are_brought_up_takes_them_down(workbench):
    workbench.names.append("actors")
    waiting = 'import sky_monarch as sm; sm.launch_hosts(2, setup="sleep 600", workdir="tests/support")'
    program = subprocess.Popen(
        [sys.executable, "-c", waiting], env=workbench.env, cwd=ROOT, stderr=subprocess.PIPE
    )
    with program:
        eventually(lambda: workbench.status("actors")["state"] == "SETUP", within_s=60, what="it is launched")
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=60)
    assert b"KeyboardInterrupt" in said
    assert workbench.status("actors")["state"] == "CANCELLED"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "file", ["test_actors_calls.py", "test_actors_supervision.py", "test_actors_channels.py"]
)
def test_what_holds_on_one_host_holds_over_hosts(file, tmp_path):
    """The tests of one host, with each mesh that they spawn on one of two others."""
    argv = ["-m", "pytest", "-q", "-p", "tests.support.over_hosts", f"tests/integration/{file}", "-m", ""]
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(tmp_path),
            "SKY_MONARCH_TEST_BESIDE": "1",
        },
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]


def test_the_end_of_a_killed_host_that_has_dialled_is_told_at_once_and_leaves_nothing(failures):
    hosts = local_hosts(2)
    mesh = hosts.spawn_procs(name="trainers").spawn("plain", Plain)
    took_s = []
    for pid in mesh.pid.call().get(LIMIT_S).values():
        server = server_of(pid)
        below = [server, *children_of(server), *children_of(parent_of(pid))]
        assert len(below) == 4, (
            "what serves the host, what outlives that, what starts processes, and one of these"
        )
        known = len(failures)
        began_s = time.monotonic()
        os.kill(server, signal.SIGKILL)
        eventually(lambda known=known: len(failures) > known, every_s=0.005)
        took_s.append(time.monotonic() - began_s)
        eventually(lambda below=below: not any(map(is_alive, below[1:])), what="all of it has ended")
    assert [failure.host for failure in failures] == ["local-0", "local-1"]
    print(f"told of two killed hosts after {' and '.join(f'{one * 1000:.0f} ms' for one in took_s)}")
    # One may be held up on a machine that is busy.
    assert min(took_s) < 1.0, "nobody waits whether it dials again"
