"""The cluster by itself: what the scenarios stand on does what they count on, and leaves nothing."""

from __future__ import annotations

import pwd
import socket
from pathlib import Path

import pytest

from tests.e2e.layout import USER
from tests.e2e.site import Site
from tests.e2e.slurm import GPU, GRACE_S, Slurm
from tests.support.processes import is_alive
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(400)


def test_tearing_down_twice_leaves_no_process_port_user_mount_or_folder() -> None:
    slurm = Slurm(nodes=1)
    slurm.start()
    job = slurm.submit("n1", "sleep infinity")
    eventually(lambda: slurm.jobs()[0].state == "RUNNING", within_s=20, what="the job runs")
    names = ("ctl", "login", "n1")
    pids = {pid for name in names for pid in slurm.node(name).processes()}
    assert len(pids) > len(names), "there were some"
    assert job == slurm.jobs()[0].number
    assert str(slurm.root) not in Path("/proc/1/mountinfo").read_text(), "nobody else sees its mounts"

    slurm.close()
    slurm.close()

    assert [pid for pid in pids if is_alive(pid)] == []
    assert not slurm.root.exists()
    for who in ("self", "1"):
        assert str(slurm.root) not in Path(f"/proc/{who}/mountinfo").read_text()
    with pytest.raises(KeyError):
        pwd.getpwnam(USER)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", slurm.ssh_port)) != 0


def test_a_cluster_whose_start_is_interrupted_leaves_nothing_either() -> None:
    slurm = Slurm(nodes=1)
    (slurm.root / "bin").write_text("in the way of a folder")

    with pytest.raises(OSError, match="bin"):
        slurm.start()

    assert not slurm.root.exists()


def test_nodes_offer_gpus_that_say_that_they_are_simulated(site: Site) -> None:
    for node in site.slurm.nodes:
        said = site.slurm.command("scontrol", "show", "node", node)
        assert f"Gres=gpu:{GPU}:1" in said
        assert "AvailableFeatures=SIMULATED" in said
        assert site.slurm.node_state(node) == "idle"


@pytest.mark.slow
def test_skypilot_launches_a_task_on_a_node_whose_python_has_torch(site: Site) -> None:
    find = "import importlib.util as u; print([bool(u.find_spec(n)) for n in ('torch', 'torchft', 'sky_monarch')])"
    run = f'echo "on $(hostname) with $ROCR_VISIBLE_DEVICES"\npython3 -c "{find}"\n'
    launched = site.sky.launch("bare", site.sky.task(run, node="n2"))
    try:
        assert site.sky.call("status").value == {"bare": "UP"}

        def ended() -> str:
            text = str(site.sky.call("logs", cluster="bare", job=launched.value).value["text"])
            assert "[True, True, False]" in text, text
            return text

        assert "on n2 with 0" in eventually(ended, within_s=60)
        assert [job.node for job in site.slurm.jobs(named="bare")] == ["n2"]
    finally:
        site.sky.call("down", cluster="bare")
    eventually(lambda: not site.slurm.jobs(), within_s=30, what="the queue is empty")


@pytest.mark.slow
def test_a_killed_node_is_missed_by_slurm_half_a_minute_later_and_can_come_back(site: Site) -> None:
    slurm = site.slurm
    number = slurm.submit("n3", "sleep infinity")
    eventually(lambda: slurm.jobs()[0].state == "RUNNING", within_s=20, what="the job runs")
    pids = slurm.node("n3").processes()
    assert len(pids) >= 4, "a shell, slurmd, its step, the job"

    slurm.kill_node("n3")

    assert [pid for pid in pids if is_alive(pid)] == []
    assert [job.number for job in slurm.jobs()] == [number], "Slurm has not noticed yet"
    slurm.wait_for_node("n3", "down", within_s=60)
    eventually(lambda: not slurm.jobs(), within_s=10, what="the job is gone with its node")
    slurm.start_node("n3")


@pytest.mark.slow
def test_what_is_pre_empted_is_told_and_has_its_time_of_grace(site: Site) -> None:
    slurm = site.slurm
    told = slurm.root / "home/told"
    deaf = f"srun bash -c \"trap 'cut -d. -f1 /proc/uptime >> {told}' TERM; for i in {{1..300}}; do sleep 0.2; done\""
    low = slurm.submit("n1", deaf, name="low")
    eventually(lambda: slurm.jobs()[0].state == "RUNNING", within_s=20, what="the job runs")
    eventually(lambda: slurm.node("n1").processes(), within_s=5)

    urgent = slurm.take("n1")
    eventually(told.exists, within_s=10, what="the job was told")
    eventually(
        lambda: [job.number for job in slurm.jobs() if job.state == "RUNNING"] == [urgent],
        within_s=GRACE_S + 30,
        every_s=0.2,
        what="the urgent job runs",
    )

    began = float(Path("/proc/uptime").read_text().split(".")[0])
    assert began - float(told.read_text().split()[0]) >= GRACE_S - 2, "not before the time of grace was over"
    assert "JobState=PREEMPTED" in slurm.command("scontrol", "show", "job", str(low))
    slurm.cancel(urgent)
    slurm.wait_for_node("n1", "idle")
