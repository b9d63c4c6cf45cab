"""Runs beyond this machine: what the head's files say, what hosts get, what is refused before money is spent."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from sky_monarch.config import JobSpec, load_job
from sky_monarch.errors import ConfigError
from sky_monarch.launch.bootstrap import RUN, SETUP
from sky_monarch.launch.cluster_plan import plan_clusters
from sky_monarch.launch.plan import LocalPlan, plan_local
from sky_monarch.launch.remote import RemotePlan, launchable, plan_remote, rehearsal
from sky_monarch.launch.shipping import Shipment
from sky_monarch.launch.tunnel import tunnel_address
from sky_monarch.launch.wheel import Wheel
from sky_monarch.launch.workdir import Listing

BASE = "name: demo\nreplicas: 3\nrun: python train.py\nenvs: {A: env-canary}\nsecrets: {S: secret-canary}\n"
SLURM = "infra: slurm/loop/gpu\nresources: {accelerators: MI300X:1}\n"
RUN_DIR = Path("/state/runs/demo-1")
SHIPMENT = Shipment(
    wheel=Wheel(file_name="sky_monarch-0.1.0-x.whl", version="0.1.0", digest="a" * 12, source=Path("/x")),
    workdir=Listing(source=Path("/home/me/job"), files=("train.py",), empty=(), size_bytes=9, rule="git"),
)
IDENTITIES = {
    who: {"name": who, "key_pem": f"key-canary-{who}"} for who in ("agent", "controller", "lighthouse")
}


def job(text: str = SLURM, base: str = BASE) -> JobSpec:
    return load_job(base + text, base_dir=Path("/"))


def local(spec: JobSpec) -> LocalPlan:
    return plan_local(
        {**spec.public_dict(), "workdir": "/home/me/job"},
        spec.private_values(),
        run_id="demo-1",
        state=Path("/state"),
        temporary=Path("/tmp"),
        python="/opt/bin/python",
        version="0.1.0",
        token="token-canary",
        base_env={"HOME": "/home/me", "EXPORTED": "base-canary"},
        host="head",
    )


def planned(text: str = SLURM, *, address: str = "10.0.0.5", hosts: int | None = None) -> RemotePlan:
    spec = job(text)
    chosen = launchable(spec, plan_clusters(spec)) if hosts is None else rehearsal(spec, hosts)
    return plan_remote(
        local(spec),
        chosen,
        address=address,
        authority={"ca_pem": "ca", "key_pem": "authority-canary", "expires_s": 1.0},
        identities=IDENTITIES,
        shipment=SHIPMENT if hosts is None else None,
    )


def refusal(text: str, base: str = BASE) -> str:
    spec = job(text, base)
    with pytest.raises(ConfigError) as caught:
        launchable(spec, plan_clusters(spec))
    return f"{caught.value} / {caught.value.hint}"


# --- the head -------------------------------------------------------------------------------------


def test_the_head_has_no_groups_and_every_host_has_its_own():
    controller = planned().head.files["controller.json"]

    assert controller["host"] == "head"
    assert controller["hosts"] == [
        {"name": "head", "groups": [], "provisioned": False},
        {"name": "demo-h0", "groups": [0], "provisioned": True},
        {"name": "demo-h1", "groups": [1], "provisioned": True},
        {"name": "demo-h2", "groups": [2], "provisioned": True},
    ]
    assert controller["tls"] is True
    assert controller["choices"] == 1


@pytest.mark.parametrize(("address", "port"), [("10.0.0.5", "10.0.0.5:0"), ("fd00::5", "[fd00::5]:0")])
def test_what_hosts_dial_listens_on_the_chosen_address_alone(address, port):
    files = planned(address=address).head.files
    services = {service["name"]: service for service in files["agent.json"]["services"]}

    assert services["lighthouse"]["listen"] == [port, port]
    assert services["controller"]["listen"] == port
    assert services["provisioner"]["listen"] is None
    assert services["provisioner"]["argv"] == [
        "/opt/bin/python",
        "-m",
        "sky_monarch.provision",
        str(RUN_DIR / "provisioner.json"),
    ]
    assert files["lighthouse.json"]["control"] == [f"unix:{RUN_DIR}/lighthouse.sock", f"tls:{port}"]
    assert files["lighthouse.json"]["address"] == address
    assert files["lighthouse.json"]["tls"] is True
    assert files["agent.json"]["host"] == "head"
    assert files["agent.json"]["controller"].startswith("unix:"), "the head's own agent needs no TLS"


def test_secrets_are_in_one_file_and_in_no_task():
    plan = planned()
    assert plan.head.files["private.json"]["authority"]["key_pem"] == "authority-canary"
    assert plan.head.files["private.json"]["identities"] == IDENTITIES
    others = {name: content for name, content in plan.head.files.items() if name != "private.json"}

    text = json.dumps([others, dict(plan.head.run_json), list(plan.head.agent_argv)])

    assert "canary" not in text
    assert "canary" not in repr(plan.choices)


def test_what_was_exported_here_goes_to_no_other_machine_but_skypilot_has_it():
    private = planned().head.files["private.json"]
    assert (private["base_env"], private["shell_env"]["EXPORTED"]) == ({}, "base-canary")
    assert planned("", hosts=2).head.files["private.json"]["base_env"]["EXPORTED"] == "base-canary"


def test_a_run_of_this_machine_is_planned_as_ever():
    files = local(job("")).files

    assert [service["name"] for service in files["agent.json"]["services"]] == ["lighthouse", "controller"]
    assert "hosts" not in files["controller.json"]
    assert "tls" not in files["lighthouse.json"]


# --- what hosts get -------------------------------------------------------------------------------


def test_the_provisioner_is_told_all_it_needs_and_the_tasks_are_whole():
    config = planned().head.files["provisioner.json"]

    assert (config["run_id"], config["provider"], config["job"]) == (
        "demo-1",
        "skypilot",
        str(RUN_DIR / "job.json"),
    )
    assert config["private"] == str(RUN_DIR / "private.json")
    assert config["ship"]["wheel"] == str(RUN_DIR / "ship/host/sky_monarch-0.1.0-x.whl")
    assert (config["ship"]["files"], config["ship"]["bytes"]) == (1, 9)
    (choice,) = config["choices"]
    assert [entry["cluster"] for entry in choice["tasks"]] == ["demo-h0", "demo-h1", "demo-h2"]
    for entry in choice["tasks"]:
        task = entry["task"]
        assert (task["setup"], task["run"]) == (SETUP, RUN)
        assert task["workdir"] == str(RUN_DIR / "ship/workdir")
        assert task["file_mounts"] == {f"~/.sky-monarch/ship/0.1.0-{'a' * 12}": str(RUN_DIR / "ship/host")}
        assert task["envs"]["SKY_MONARCH_SHIP"] == f"0.1.0-{'a' * 12}"
        assert "secrets" not in task
    assert json.dumps(config), "it is written as JSON"


@pytest.mark.parametrize("text", [SETUP, RUN])
def test_the_text_of_a_task_is_the_same_for_all_and_a_shell_takes_it(text):
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=60)
    assert len(text.splitlines()) == 1


def test_run_json_names_what_may_have_to_be_taken_down():
    run = planned().head.run_json

    assert run["hosts"] == ["demo-h0", "demo-h1", "demo-h2"]
    assert (run["provider"], run["infra"]) == ("skypilot", "slurm/loop/gpu")


# --- what this version does not launch ------------------------------------------------------------


def test_a_head_that_would_be_lost_with_all_groups_is_refused_with_the_fix():
    said = refusal("infra: runpod\nresources: {accelerators: MI300X:1}\n")

    assert "demo-h0, with all groups, and be lost with them" in said
    assert "write head: here" in said
    spec = job("infra: runpod\nhead: here\nresources: {accelerators: MI300X:1}\n")
    assert len(launchable(spec, plan_clusters(spec)).choices) == 1


def test_a_head_beside_the_api_server_is_refused_with_the_fix():
    said = refusal("infra: k8s\nhead: api-server\nresources: {accelerators: MI300X:1}\n")

    assert "no process of a run's own" in said
    assert "write head: cluster" in said


def test_a_group_over_several_hosts_is_launched_with_a_lighthouse_that_is_told_of_a_lost_one():
    text = "infra: slurm\nresources: {accelerators: MI300X:16}\nranks_per_replica: 16\n"
    spec = job(text)

    (choice,) = launchable(spec, plan_clusters(spec)).choices
    assert len(choice.hosts) == 2 * spec.replicas
    assert "one group would take several hosts" in refusal(f"{text}lighthouse: torchft\n")


def test_a_rehearsal_with_more_hosts_than_groups_shares_the_ranks_of_each_out():
    spec = job("ranks_per_replica: 4\n")

    (choice,) = rehearsal(spec, 2 * spec.replicas).choices
    assert [(host.groups, host.node, host.nodes) for host in choice.hosts[:3]] == [
        ((0,), 0, 2),
        ((0,), 1, 2),
        ((1,), 0, 2),
    ]
    with pytest.raises(ConfigError, match="equal part of the 4 ranks"):
        rehearsal(spec, 3 * spec.replicas)
    with pytest.raises(ConfigError, match="equal part of the 4 ranks"):
        rehearsal(spec, 2 * spec.replicas + 1)


APART = "infra: runpod\nplacement: any\nresources: {accelerators: MI300X:8}\nranks_per_replica: 8\n"


def test_hosts_without_a_common_network_average_rarely_through_the_head():
    plan = planned(f"{APART}sync: diloco(20)\n")

    files = plan.head.files
    assert [service["name"] for service in files["agent.json"]["services"]] == [
        "lighthouse",
        "controller",
        "relay",
        "provisioner",
    ]
    relay = files["agent.json"]["services"][2]
    assert relay["listen"].endswith(":0"), "its port outlives it"
    assert relay["argv"][1:] == ["-m", "sky_monarch.relay", str(RUN_DIR / "relay.json")]
    assert files["relay.json"]["private"] == str(RUN_DIR / "private.json")
    assert files["controller.json"]["tunnel"] is True
    assert files["lighthouse.json"]["address"] == "127.64.0.1", "stores are reached through the tunnel alone"


def test_hosts_with_a_common_network_get_no_relay():
    files = planned().head.files

    assert "relay.json" not in files
    assert "tunnel" not in files["controller.json"]
    assert not any(service["name"] == "relay" for service in files["agent.json"]["services"])


@pytest.mark.parametrize(
    ("more", "reason", "fix"),
    [
        ("sync: diloco(20)\nhead: cluster\n", "nobody could dial a head that is one of them", "head: here"),
        ("sync: diloco(20)\nlighthouse: torchft\n", "knows no rendezvous", "leave lighthouse out"),
    ],
)
def test_what_the_tunnel_does_not_carry_is_refused_with_the_fix(more, reason, fix):
    said = refusal(APART + more)

    assert reason in said
    assert fix in said


def test_groups_on_one_host_without_a_common_network_keep_no_spare_one():
    text = "infra: runpod\nhead: here\nresources: {accelerators: MI300X:1}\nrecovery: {spare: 1}\n"
    said = refusal(text)

    assert "mapped ports only" in said
    assert "averages every n steps" in said


def test_candidates_with_and_without_a_common_network_are_not_mixed():
    text = (
        "infra: slurm\nhead: here\nplacement: any\nsync: diloco(20)\nranks_per_replica: 8\n"
        "resources: {accelerators: MI300X:8, ordered: [{infra: slurm}, {infra: runpod}]}\n"
    )
    spec = job(text)

    found = launchable(spec, plan_clusters(spec))

    assert [choice.infra for choice in found.choices] == ["slurm"]
    assert any("with a tunnel there, and without one" in reason for reason in found.left_out)


@pytest.mark.parametrize("host", ["demo", "demo-h", "demo-h01", "demo-h4194302", "demo-h-1"])
def test_a_host_of_another_name_has_no_place_in_the_tunnel(host):
    assert tunnel_address("my-h-h300") == "127.64.1.46"
    with pytest.raises(ConfigError, match="no place in the tunnel"):
        tunnel_address(host)


def test_candidates_may_place_groups_each_in_its_own_way_and_what_is_left_out_has_its_reason():
    text = (
        "infra: slurm\nhead: here\nplacement: any\nsync: diloco(20)\n"
        "resources: {accelerators: MI300X:1, ordered: [{infra: slurm/a}, {infra: slurm/b},"
        " {accelerators: MI300X:2}, {infra: oci}, {infra: azure},"
        " {infra: local, accelerators: null}]}\n"
    )
    spec = job(text)

    found = launchable(spec, plan_clusters(spec))

    homes = [(choice.infra, [host.groups for host in choice.hosts]) for choice in found.choices]
    assert homes == [
        ("slurm/a", [(0,), (1,), (2,)]),
        ("slurm/b", [(0,), (1,), (2,)]),
        ("oci", [(0, 1, 2)]),
        ("azure", [(0, 1, 2)]),
    ]
    assert found.hosts == found.choices[0].hosts, "what the run begins with"
    assert any("this machine is not mixed" in reason for reason in found.left_out)
    assert any("2 GPUs there, and 1 in the first candidate" in reason for reason in found.left_out)


def test_groups_over_several_hosts_are_placed_once_for_all_candidates():
    spec = job()
    plan = plan_clusters(spec)
    (choice,) = plan.choices
    wide = dataclasses.replace(
        choice, infra="slurm/other", hosts=tuple(dataclasses.replace(host, nodes=2) for host in choice.hosts)
    )
    found = launchable(spec, dataclasses.replace(plan, choices=(choice, wide)))

    assert found.choices == (choice,)
    (reason,) = found.left_out
    assert "a group takes 2 hosts there and 1 in the first candidate" in reason
    assert "set resources.gpus_per_host to a size that all candidates have" in reason


def test_where_nothing_is_left_every_reason_is_told():
    said = refusal(
        "head: api-server\nresources: {accelerators: MI300X:1, ordered: [{infra: k8s}, {infra: ssh}]}\n"
    )

    assert "none of the 2 candidates" in said
    assert "on k8s: " in said
    assert "on ssh: " in said


# --- a rehearsal ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("hosts", "groups"), [(1, [[0, 1, 2]]), (2, [[0, 1], [2]]), (3, [[0], [1], [2]])])
def test_a_rehearsal_shares_the_groups_out(hosts, groups):
    plan = planned("", hosts=hosts, address="127.0.0.1")

    assert [list(host.groups) for host in plan.hosts] == groups
    config = plan.head.files["provisioner.json"]
    assert (config["provider"], config["ship"]) == ("local", None)
    assert [host["cluster"] for host in config["choices"][0]["hosts"]] == [f"demo-h{n}" for n in range(hosts)]
    assert plan.head.files["agent.json"]["services"][0]["listen"] == ["127.0.0.1:0", "127.0.0.1:0"]


@pytest.mark.parametrize(
    ("text", "hosts", "words"),
    [
        ("", 4, "there are 3 replica groups"),
        ("", 0, "there are 3 replica groups"),
        (SLURM, 2, "the job runs on slurm/loop/gpu"),
        ("resources: {accelerators: MI300X:1}\n", 2, "count its GPUs from 0"),
        ("lighthouse: torchft\n", 2, "no authentication"),
    ],
)
def test_a_rehearsal_that_cannot_be_is_refused(text, hosts, words):
    with pytest.raises(ConfigError, match=words) as caught:
        rehearsal(job(text), hosts)
    assert caught.value.hint


def test_the_plan_of_the_head_is_of_the_very_run():
    spec = job("")
    before = local(spec)

    after = planned("", hosts=1).head

    assert dataclasses.replace(after, files=before.files, run_json=before.run_json) == before


def test_a_spare_host_is_provisioned_for_no_group_in_a_rehearsal_too() -> None:
    spec = job("infra: local\nrecovery: {spare: 1}\n")
    assert [(host.cluster, host.groups) for host in rehearsal(spec, 2).hosts] == [
        ("demo-h0", (0, 1)),
        ("demo-h1", (2,)),
        ("demo-h2", ()),
    ]
    spec = job(SLURM + "recovery: {spare: 1}\n")
    chosen = launchable(spec, plan_clusters(spec))
    plan = plan_remote(
        local(spec), chosen, address="10.0.0.1", authority={}, identities=IDENTITIES, shipment=SHIPMENT
    )
    placed = plan.head.files["controller.json"]["hosts"]
    assert placed[-1] == {"name": "demo-h3", "groups": [], "provisioned": True}
    assert plan.head.run_json["hosts"][-1] == "demo-h3", "down and purge know of it"
