"""Telling an agent that its host is about to be taken away; the agent's side is tested in Rust and on real hosts."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sky_monarch import agent, notice
from sky_monarch.config import load_job
from sky_monarch.errors import ConfigError
from sky_monarch.launch.bootstrap import shipped
from sky_monarch.launch.cluster_plan import plan_clusters
from sky_monarch.launch.notices import FOLDER, SHIP, notices_on, preemption_hook
from sky_monarch.launch.tasks import ADDED, IDLE_MINUTES
from sky_monarch.provision.host_task import address, armed
from sky_monarch.provision.provider import HostOrder
from tests.support.waiting import eventually


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    values = {"run_dir": str(tmp_path / "run"), "host": "demo-h1"}
    (tmp_path / "agent.json").write_text(json.dumps(values))
    return tmp_path


def test_it_says_why_and_until_when_and_waits_for_the_agent_to_leave(home: Path) -> None:
    codes: list[int] = []
    words = ["--notice", str(home), "--grace", "30", "--reason", "the pod is evicted"]
    before_ns = time.monotonic_ns()
    giver = threading.Thread(target=lambda: codes.append(agent.main(words)))
    giver.start()
    place = home / "run/notice-demo-h1.json"
    eventually(place.exists)
    said = json.loads(place.read_text())
    assert said["reason"] == "the pod is evicted"
    assert before_ns <= said["until_mono_ns"] - 30_000_000_000 <= time.monotonic_ns()
    assert [path.name for path in (home / "run").iterdir()] == [place.name], "written at once, or not at all"
    assert codes == []
    place.unlink()  # as the agent does
    giver.join(20)
    assert codes == [0]


def test_an_agent_that_does_not_leave_is_waited_for_no_longer_than_the_host_is_there(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert agent.main(["--notice", str(home), "--grace", "0.2"]) == 1
    assert "has not left within 0.2 s" in capsys.readouterr().err


def test_where_there_is_no_agent_nobody_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert agent.main(["--notice", str(tmp_path)]) == 2
    assert "belongs to no agent" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "agent.json").write_text('{"run_dir": "/nowhere/at/all", "host": "demo-h1"}')
    with pytest.raises(ConfigError, match="cannot leave a notice"):
        notice.main([str(tmp_path), "--grace", "1"])


def test_skypilots_hook_tells_the_agent_and_leaves_it_its_time() -> None:
    hook = preemption_hook(python="$HOME/venv/bin/python", directory="$HOME/runs/r/demo-h1-a1", grace_s=40)
    assert hook == {
        "run": '"$HOME/venv/bin/python" -m sky_monarch.agent --notice "$HOME/runs/r/demo-h1-a1" --grace 40 '
        '--reason "SkyPilot\'s hook: ${SKYPILOT_HOOK_EVENT:-preemption}"\n',
        "events": ["preemption"],
        "timeout": 45,
    }


@pytest.mark.parametrize(
    ("infra", "kind"),
    [
        ("azure/eastus", "azure"),
        ("OCI", "oci"),
        ("runpod", "runpod"),
        ("k8s/context", "off"),
        ("local", "off"),
    ],
)
def test_the_agent_asks_the_cloud_that_it_is_on(infra: str, kind: str) -> None:
    assert notices_on(infra) == {"kind": kind}


ORDER = HostOrder(host="demo-h1", attempt=2, want="up", agent={"run_id": "demo-1"}, enrolment="hush-hush")


def planned(infra: str) -> dict[str, Any]:
    """The task of a host, as `plan` prints it."""
    apart = "placement: any\nsync: diloco(20)\n"  # for places whose hosts have no network of their own
    text = f"name: demo\nreplicas: 2\nrun: x\ninfra: {infra}\nresources: {{accelerators: MI300X:8}}\n{apart}"
    choice = plan_clusters(load_job(text)).choices[0]
    return dict(choice.documents())["demo-h1"]


def addressed(infra: str) -> dict[str, Any]:
    """The same, as it is launched."""
    ship = shipped(planned(infra), ship_id="0.1.0-abc", files=Path("/run/host"), workdir=Path("/run/workdir"))
    return armed(address(ship, ORDER), infra=None, autodown_minutes=IDLE_MINUTES)


@pytest.mark.parametrize("infra", ["k8s/context", "ssh/pool", "oci", "slurm/alps/gpu"])
def test_what_a_plan_prints_is_the_very_task_that_is_launched_but_for_what_it_says_is_added(
    infra: str,
) -> None:
    whole, said = addressed(infra), planned(infra)

    for added in ADDED:
        field, _, name = added.partition(" ")
        if field in ("envs", "secrets"):
            del whole[field][name]
        elif field == "workdir":
            whole["workdir"] = said["workdir"]
        elif field == "file_mounts":
            del whole[field]
    assert whole.pop("secrets") == {}
    text = json.dumps(whole).replace("0.1.0-abc", SHIP).replace("demo-1/demo-h1-a2", FOLDER)
    assert json.loads(text) == said
    assert bool(said.get("config")) == infra.startswith(("k8s", "ssh")), "the hook for pre-emption"


def test_a_pod_has_the_hook_and_a_host_of_a_cloud_asks_that() -> None:
    pod = addressed("k8s/context")
    (hook,) = pod["config"]["hooks"]
    agent = '$HOME/.sky-monarch/0.1.0-abc/bin/python" -m sky_monarch.agent'
    assert f'"{agent} --notice "$HOME/.sky-monarch/runs/demo-1/demo-h1-a2" ' in hook["run"]
    assert json.loads(pod["envs"]["SKY_MONARCH_HOST"])["notices"] == {"kind": "off"}
    assert "hush-hush" not in json.dumps({**pod, "secrets": None})

    machine = addressed("azure/eastus")
    assert "config" not in machine
    assert json.loads(machine["envs"]["SKY_MONARCH_HOST"]) == {
        "run_id": "demo-1",
        "notices": {"kind": "azure"},
    }
