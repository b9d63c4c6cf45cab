"""Plans: what agents are given for a job."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from sky_monarch.config import JobSpec, load_job
from sky_monarch.controller import model
from sky_monarch.controller.plans import DEVICE_ENV, Plans, build_environment
from sky_monarch.controller.room import Room
from sky_monarch.controller.settings import Settings, load_settings
from sky_monarch.errors import ConfigError
from sky_monarch.launch.cluster_plan import plan_clusters

PYTHON = "/opt/sky/bin/python"


def settings(
    *, hosts: dict[str, tuple[int, ...]] | None = None, injections: Any = (), **job: Any
) -> Settings:
    fields = {"name": "demo", "replicas": 2, "run": "python train.py", "workdir": "/data/job", **job}
    spec = JobSpec(**fields)
    return Settings(
        run_id="demo-1",
        run_dir=Path("/runs/demo-1"),
        name="demo",
        infra="local",
        created_ms=1,
        token="t0ken",
        base_env={"PATH": "/usr/bin", "HOME": "/home/u", "SKY_MONARCH_TOKEN": "of another run"},
        envs=spec.private_values()["envs"],
        secrets=spec.private_values()["secrets"],
        job=spec.public_dict(),
        api=Path("/runs/api.sock"),
        channel="unix:/runs/controller.sock",
        lighthouse_kind="sky-monarch",
        lighthouse_address="127.0.0.1:41234",
        lighthouse_control="unix:/runs/lighthouse.sock",
        injections=tuple(injections),
        hosts=hosts or {"local": tuple(range(spec.replicas))},
    )


def group(replica: int = 0, **options: Any) -> dict[str, Any]:
    return Plans(settings(**options), python=PYTHON).group(replica, generation=1, max_restarts=99)


def test_a_group_plan_holds_all_that_an_agent_needs() -> None:
    plan = group(1, ranks_per_replica=2, preload=["torch"])
    assert (plan["replica"], plan["replicas"], plan["world_size"], plan["generation"]) == (1, 2, 2, 1)
    assert plan["command"] == {"kind": "exec", "argv": ["python", "train.py"]}
    assert plan["workdir"] == "/data/job"
    assert plan["lighthouse"] == "http://127.0.0.1:41234"
    assert plan["lighthouse_control"] == "unix:/runs/lighthouse.sock"
    assert plan["preload"] == ["torch"]
    assert plan["log_segment_bytes"] == 16 * 2**20
    assert plan["devices"] == []
    assert plan["device_env"] is None


def test_every_value_reaches_the_ranks_as_typed() -> None:
    value = "a$b\"c`d'\n=é"
    plan = group(envs={"A": value, "B": "010"}, secrets={"S": value})
    assert (plan["envs"]["A"], plan["envs"]["B"], plan["envs"]["S"]) == (value, "010", value)


def test_the_identity_of_another_run_is_not_handed_on() -> None:
    assert "SKY_MONARCH_TOKEN" not in group()["envs"]


def test_the_folder_of_our_python_comes_first_unless_an_environment_is_active() -> None:
    def path(base: dict[str, str], envs: dict[str, str] | None = None) -> str:
        return build_environment(base, envs or {}, {}, python=PYTHON)["PATH"]

    assert path({"PATH": "/usr/bin"}) == "/opt/sky/bin:/usr/bin"
    assert path({"PATH": "/usr/bin:/opt/sky/bin"}) == "/opt/sky/bin:/usr/bin", (
        "once, however often it is done"
    )
    assert path({"HOME": "/home/u"}) == f"/opt/sky/bin:{os.defpath}"
    assert path({"PATH": "/v/bin", "VIRTUAL_ENV": "/v"}) == "/v/bin"
    assert path({"PATH": "/c/bin", "CONDA_PREFIX": "/c"}) == "/c/bin"
    assert path({"PATH": "/usr/bin", "VIRTUAL_ENV": ""}) == "/opt/sky/bin:/usr/bin"
    assert path({"PATH": "/usr/bin"}, {"PATH": "/own"}) == "/own", "a PATH of the job itself stays"


def test_a_lease_never_exceeds_the_budget_of_the_job() -> None:
    plans = Plans(settings(recovery={"max_restarts": 3}), python=PYTHON)
    lease = [plans.group(0, generation=1, max_restarts=n)["recovery"]["max_restarts"] for n in (99, 2, 0)]
    assert lease == [3, 2, 0]
    start = model.StartGroup(
        host="local", replica=0, generation=2, max_restarts=1, spent_s=(7.5, 0.0), reason="again"
    )
    recovery = plans.command(start)["recovery"]
    assert (recovery["max_restarts"], recovery["spent_s"]) == (1, [7.5, 0.0]), (
        "the agent forgets them in time"
    )


def test_limits_keep_their_meaning_on_the_wire() -> None:
    def limits(**recovery: Any) -> tuple[Any, Any]:
        plan = group(recovery=recovery)["recovery"]
        return plan["startup_limit_s"], plan["progress_limit_s"]

    assert limits() == (1800.0, "auto")
    assert limits(startup_limit_s="off", progress_limit_s="off") == (None, "off")
    assert limits(startup_limit_s=9, progress_limit_s=60) == (9, 60)


def test_how_far_a_standby_goes_is_told_to_the_agent() -> None:
    assert group()["recovery"]["standby_until"] == "imports"
    assert group(recovery={"standby_until": "session"})["recovery"]["standby_until"] == "session"


def test_nothing_is_preloaded_without_a_standby() -> None:
    assert group(recovery={"standby": 0}, preload=["torch"])["preload"] == []


def test_devices_lie_side_by_side_and_every_rank_gets_its_own() -> None:
    job = {"ranks_per_replica": 2, "resources": {"accelerators": "MI300X:4"}}
    plans = [group(replica, **job) for replica in range(2)]
    assert [plan["devices"] for plan in plans] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert {plan["device_env"] for plan in plans} == {DEVICE_ENV}
    apart = {"a": (1,), "b": (0,)}
    assert group(1, hosts=apart, **job)["devices"] == [[0, 1], [2, 3]], "each host counts from 0"


def test_devices_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ConfigError, match="evenly"):
        group(ranks_per_replica=3, resources={"accelerators": "MI300X:4"})


def test_an_injection_goes_to_its_own_group_and_only_until_it_was_carried_out() -> None:
    injection = {"id": 4, "slot": {"replica": 1, "rank": 0}, "fault": "kill", "trigger": {"step": 30}}
    plans = Plans(settings(injections=[injection]), python=PYTHON)

    def given(replica: int, fired: set[int]) -> list[Any]:
        return plans.group(replica, generation=1, max_restarts=1, fired=fired)["injections"]

    assert (given(0, set()), given(1, set()), given(1, {4})) == ([], [injection], [])


def test_a_checkpoint_is_told_with_its_absolute_folder() -> None:
    envs = group(checkpoint={"to": "ckpt", "every_steps": 10})["envs"]
    assert json.loads(envs["SKY_MONARCH_CHECKPOINT"]) == {
        "to": "/data/job/ckpt",
        "every_steps": 10,
        "keep": 2,
        "on_notice": "leave",
    }
    assert "SKY_MONARCH_CHECKPOINT" not in group()["envs"]


def test_ranks_are_told_of_outer_steps() -> None:
    assert group(sync="diloco(20)")["envs"]["SKY_MONARCH_SYNC"] == "diloco(20)"
    assert "SKY_MONARCH_SYNC" not in group()["envs"]


def test_setup_gets_the_same_environment() -> None:
    plans = Plans(settings(setup="make", envs={"A": "1"}), python=PYTHON)
    assert plans.has_setup
    setup = plans.command(model.Setup(host="local", reason="r"))
    assert (setup["type"], setup["script"], setup["workdir"]) == ("setup", "make", "/data/job")
    assert setup["envs"]["A"] == "1"
    assert not Plans(settings(), python=PYTHON).has_setup


def test_settings_show_no_secret() -> None:
    text = repr(settings(envs={"A": "canary-1"}, secrets={"S": "canary-2"}))
    assert "canary" not in text
    assert "t0ken" not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run_id": None}, "run_id"),
        ({"lighthouse_kind": "other"}, "lighthouse_kind"),
        ({"api": None, "sockets": None}, "sockets"),
        ({"hosts": [{"name": "a", "groups": [0]}]}, "hosts place"),
        ({"hosts": [{"groups": [0]}]}, "not a list"),
        ({"private": "/nowhere"}, "/nowhere cannot be read"),
        ({"tls": "yes"}, "tls is 'yes'"),
        ({"tls": True}, "SKY_MONARCH_LIGHTHOUSE_CONTROL_ADDR is not set"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    config = written(tmp_path, **change)
    with pytest.raises(ConfigError, match=words):
        load_settings(config, {"SKY_MONARCH_LIGHTHOUSE_ADDR": "127.0.0.1:1"})


def written(folder: Path, **change: Any) -> Path:
    spec = JobSpec(name="demo", replicas=2, run="x")
    files = {
        "run.json": {"name": "demo", "created_ms": 1},
        "job.json": spec.public_dict(),
        "private.json": {"token": "t", "base_env": {}, "envs": {}, "secrets": {}},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    config = {
        "run_id": "demo-1",
        "run_dir": str(folder),
        "private": str(folder / "private.json"),
        "job": str(folder / "job.json"),
        "lighthouse_kind": "sky-monarch",
        "sockets": {who: f"/s/{who}.sock" for who in ("api", "controller", "agent", "lighthouse")},
        **change,
    }
    path = folder / "controller.json"
    path.write_text(json.dumps(config))
    return path


def test_the_sockets_of_the_run_are_enough(tmp_path: Path) -> None:
    got = load_settings(written(tmp_path), {"SKY_MONARCH_LIGHTHOUSE_ADDR": "127.0.0.1:1"})
    assert (str(got.api), got.channel) == ("/s/api.sock", "unix:/s/controller.sock")
    assert got.lighthouse_control == "unix:/s/lighthouse.sock"
    assert got.hosts == {"local": (0, 1)}


PASSED = {
    "SKY_MONARCH_LIGHTHOUSE_ADDR": "127.0.0.1:1",
    "SKY_MONARCH_LIGHTHOUSE_CONTROL_ADDR": "127.0.0.1:2",
    "SKY_MONARCH_LISTEN_FD": "3",
}


def test_hosts_that_are_reached_by_tls_are_led_to_the_ports_that_the_agent_passed_on(tmp_path: Path) -> None:
    path = written(tmp_path, tls=True)
    with pytest.raises(ConfigError, match=r"no certificate in identities\.controller"):
        load_settings(path, PASSED)
    identity = {"name": "controller", "ca_pem": "CA", "cert_pem": "CERT", "key_pem": "KEY"}
    private = {"token": "t", "identities": {"controller": identity, "lighthouse": {}}}
    (tmp_path / "private.json").write_text(json.dumps(private))
    got = load_settings(path, PASSED)
    assert (got.tls, got.identity, got.listener_fd) == (True, identity, 3)
    assert got.channel == "unix:/s/controller.sock", "the head's own agent"
    assert got.lighthouse_control == "tls:127.0.0.1:2"
    assert "KEY" not in repr(got)
    with pytest.raises(ConfigError, match="SKY_MONARCH_LISTEN_FD is 'x'"):
        load_settings(path, {**PASSED, "SKY_MONARCH_LISTEN_FD": "x"})
    known = dataclasses.replace(settings(), tls=True)
    plan = Plans(known, python=PYTHON).group(0, generation=1, max_restarts=9)
    assert plan["lighthouse"] == "https://127.0.0.1:41234", "on loopback too: a rehearsal is no other run"


def test_without_tls_what_an_agent_passes_on_is_left_alone(tmp_path: Path) -> None:
    got = load_settings(written(tmp_path), PASSED)
    assert (got.tls, got.identity, got.listener_fd) == (False, None, None)
    assert got.lighthouse_control == "unix:/s/lighthouse.sock"


def test_an_address_of_the_lighthouse_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SKY_MONARCH_LIGHTHOUSE_ADDR"):
        load_settings(written(tmp_path), {})


@pytest.mark.parametrize(
    ("address", "kind", "url"),
    [
        ("127.0.0.1:4", "sky-monarch", "http://127.0.0.1:4"),
        ("[::1]:4", "sky-monarch", "http://[::1]:4"),
        ("10.0.0.1:4", "sky-monarch", "https://10.0.0.1:4"),
        ("[fd00::1]:4", "sky-monarch", "https://[fd00::1]:4"),
        ("10.0.0.1:4", "torchft", "http://10.0.0.1:4"),
    ],
)
def test_beyond_this_machine_our_lighthouse_is_dialled_with_tls(address: str, kind: str, url: str) -> None:
    known = dataclasses.replace(settings(), lighthouse_address=address, lighthouse_kind=kind)
    assert Plans(known, python=PYTHON).group(0, generation=1, max_restarts=9)["lighthouse"] == url


# --- room for more groups ---------------------------------------------------------------------------


def room(tmp_path: Path, resources: str, *, replicas: int = 2, **more: Any) -> Room:
    """That of a run beyond this machine."""
    text = f"name: demo\nreplicas: {replicas}\nrun: python train.py\ninfra: k8s/ctx\nresources: {resources}\n"
    spec = load_job(text, base_dir=Path("/"))
    (choice,) = plan_clusters(spec).choices
    provisioner = {"provider": "skypilot", "choices": [choice.to_json()]}
    (tmp_path / "provisioner.json").write_text(json.dumps(provisioner))
    hosts = {"head": (), **{host.cluster: host.groups for host in choice.hosts}}
    known = dataclasses.replace(settings(), job=spec.public_dict(), hosts=hosts, run_dir=tmp_path, **more)
    return Plans(known).room()


@pytest.mark.parametrize("asked", ["cpus: 16+", "memory_gib: 64+", "cpus: 16+, memory_gib: 64+"])
def test_a_host_that_was_asked_for_the_cores_and_memory_of_its_groups_takes_no_more(
    tmp_path: Path, asked: str
) -> None:
    gpus = "accelerators: MI300X:2, gpus_per_host: 8"
    assert (room(tmp_path, f"{{{gpus}}}").per_host, room(tmp_path, f"{{{gpus}}}").most) == (4, 4)

    sized = room(tmp_path, f"{{{gpus}, {asked}}}")
    assert (sized.per_host, sized.most) == (2, 2)
    with pytest.raises(ConfigError, match="all groups on one host"):
        sized.require(4)


def test_a_host_that_was_asked_for_fewer_groups_than_the_first_takes_as_few(tmp_path: Path) -> None:
    found = room(tmp_path, "{accelerators: MI300X:2, gpus_per_host: 4, cpus: 16+}", replicas=3)

    assert [found.on(f"demo-h{number}") for number in range(3)] == [2, 1, 2], "a new host is as the first"
    plain = room(tmp_path, "{accelerators: MI300X:2, gpus_per_host: 4}", replicas=3)
    assert [plain.on(f"demo-h{number}") for number in range(3)] == [2, 2, 2]


def test_a_head_that_is_a_cluster_knows_that_too(tmp_path: Path) -> None:
    resources = "{accelerators: MI300X:2, gpus_per_host: 4, memory_gib: 64}"
    found = room(tmp_path, resources, replicas=3, collect_s=60.0)

    assert [found.on(f"demo-h{number}") for number in range(3)] == [2, 1, 2]
