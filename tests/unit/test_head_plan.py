"""A head that is a cluster: what is launched, what it is told, and what it makes of that."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from sky_monarch.config import JobSpec, load_job
from sky_monarch.controller.model import initial_state
from sky_monarch.controller.plans import Plans
from sky_monarch.controller.scale_plan import plan_scale
from sky_monarch.controller.settings import load_settings as load_controller
from sky_monarch.enrolment import documents
from sky_monarch.errors import ConfigError
from sky_monarch.head import become_head
from sky_monarch.launch.bootstrap import HEAD_RUN, HEAD_SETUP
from sky_monarch.launch.cluster_plan import plan_clusters
from sky_monarch.launch.folder import Phase, RunFolder
from sky_monarch.launch.head import Away
from sky_monarch.launch.remote import launchable, plan_remote, rehearsal
from sky_monarch.provision.head import pinned
from sky_monarch.provision.settings import load_settings
from sky_monarch.sdk.run import Run
from tests.unit.test_remote_plan import IDENTITIES, SHIPMENT, local

BASE = "name: demo\nreplicas: 2\nrun: python train.py\nenvs: {A: env-canary}\nsecrets: {S: secret-canary}\n"
K8S = "infra: k8s\nresources: {accelerators: MI300X:1}\n"
LISTENS = {
    "SKY_MONARCH_LIGHTHOUSE_ADDR": "10.0.0.1:1",
    "SKY_MONARCH_LIGHTHOUSE_CONTROL_ADDR": "10.0.0.1:2",
    "SKY_MONARCH_CONTROLLER_ADDR": "10.0.0.1:3",
    "SKY_MONARCH_LISTEN_FD": "9",
}
AUTHORITY = {"ca_pem": "ca", "key_pem": "authority-canary", "expires_s": 1}


def job(text: str = K8S, base: str = BASE) -> JobSpec:
    return load_job(base + text, base_dir=Path("/"))


def planned(text: str = K8S, *, hosts: int | None = None, base: str = BASE):
    spec = job(text, base)
    chosen = launchable(spec, plan_clusters(spec)) if hosts is None else rehearsal(spec, hosts)
    return plan_remote(
        local(spec),
        chosen,
        address=None,
        authority=AUTHORITY,
        identities=IDENTITIES,
        shipment=SHIPMENT if hosts is None else None,
    )


def away(tmp_path: Path, plan) -> Away:
    """As the launcher reads it from its files."""
    files = dict(plan.head.files)
    files["provisioner.json"] = {
        **files["provisioner.json"],
        "private": str(tmp_path / "private.json"),
        "job": files["job.json"],
    }
    for name, content in {**files, "run.json": {**plan.head.run_json, "created_ms": 7}}.items():
        (tmp_path / name).write_text(json.dumps(content))
    found = load_settings(tmp_path / "provisioner.json").head
    assert found is not None
    return found


def test_the_head_is_a_small_cluster_that_is_launched_first_and_gets_nothing_of_the_job():
    (choice,) = planned().choices

    name, task = next(choice.documents())
    assert (name, choice.head.cluster, choice.head.own) == ("demo-head", "demo-head", True)
    assert task["resources"]["cpus"] == "2+"
    assert "accelerators" not in task["resources"]
    assert (task["setup"], task["run"]) == (HEAD_SETUP, HEAD_RUN)
    assert "workdir" not in task, "no rank runs there"
    assert len(task["file_mounts"]) == 1
    assert "ports" not in task["resources"], "none is opened: hosts share its network, and we come by SSH"


def test_one_host_has_a_head_of_its_own_where_they_share_a_network():
    one = planned(
        "infra: k8s\nreplicas: 1\nresources: {accelerators: MI300X:1}\n",
        base=BASE.replace("replicas: 2\n", ""),
    )

    assert [host.cluster for host in one.hosts] == ["demo-h0"]
    assert one.head.run_json["head"] == "demo-head"


def test_here_is_only_what_launches_and_secrets_are_in_one_file():
    plan = planned()

    assert set(plan.head.files) == {"job.json", "private.json", "controller.json", "provisioner.json"}
    assert plan.head.agent_argv[-2:] == ["sky_monarch.provision", "/state/runs/demo-1/provisioner.json"]
    assert (plan.head.run_json["head"], plan.head.run_json["hosts"]) == ("demo-head", ["demo-h0", "demo-h1"])
    others = {name: content for name, content in plan.head.files.items() if name != "private.json"}
    assert "canary" not in json.dumps([others, dict(plan.head.run_json)])
    assert "canary" not in repr(plan.choices)


def test_what_a_head_is_told_has_no_secret_and_its_secret_has_no_credentials(tmp_path):
    found = away(tmp_path, planned())

    assert "canary" not in json.dumps(found.told)
    assert "canary" not in repr(found)
    secret = json.loads(base64.b64decode(found.enrolment()))
    assert (secret["envs"], secret["secrets"]) == ({"A": "env-canary"}, {"S": "secret-canary"})
    assert secret["authority"] == AUTHORITY
    assert "base-canary" not in json.dumps(secret), "what the shell exported stays with the launcher"
    assert load_settings(tmp_path / "provisioner.json").shell_env["EXPORTED"] == "base-canary"


def test_a_head_plans_itself_where_it_is(tmp_path):
    found = away(tmp_path, planned("head: cluster\n", hosts=2))
    environ = {
        "SKY_MONARCH_HOST": json.dumps(found.told),
        "SKY_MONARCH_ENROLMENT": found.enrolment(),
        "PATH": "/head/bin",
    }
    folder = tmp_path / "runs" / "demo-head-a1"

    config = become_head(folder, environ, version="0.1.0")

    assert environ == {"PATH": "/head/bin"}, "both variables are gone"
    agent = json.loads(config.read_text())
    assert [service["name"] for service in agent["services"]] == ["lighthouse", "controller"]
    assert {service["log"].rpartition("/")[0] for service in agent["services"]} == {str(folder)}
    controller = json.loads((folder / "controller.json").read_text())
    assert [(host["name"], host["groups"], host["provisioned"]) for host in controller["hosts"]] == [
        ("head", [], False),
        ("demo-h0", [0], True),
        ("demo-h1", [1], True),
    ]
    assert controller["collect_s"] > 0
    assert json.loads((folder / "lighthouse.json").read_text())["address"] == "127.0.0.1"
    run = json.loads((folder / "run.json").read_text())
    assert (run["created_ms"], run["infra"], run["name"]) == (7, "local", "demo")
    private = folder / "private.json"
    assert private.stat().st_mode & 0o777 == 0o600
    assert json.loads(private.read_text())["base_env"] == {}
    holders = [path.name for path in folder.iterdir() if path.is_file() and "canary" in path.read_text()]
    assert holders == ["private.json"]


@pytest.mark.parametrize(
    ("more", "homes"),
    [("", {"demo-h0": (2, 3)}), (", memory_gib: 64", {"demo-h1": (2, 3)})],
    ids=["by GPUs", "by memory"],
)
def test_a_head_elsewhere_scales_to_the_free_gpus_of_its_hosts_first(tmp_path, more, homes):
    text = f"infra: k8s/ctx\nresources: {{accelerators: MI300X:2, gpus_per_host: 8{more}}}\n"
    found = away(tmp_path, planned(text))
    environ = {"SKY_MONARCH_HOST": json.dumps(found.told), "SKY_MONARCH_ENROLMENT": found.enrolment()}
    config = become_head(tmp_path / "runs" / "demo-head-a1", environ, version="0.1.0")
    certificate = dict.fromkeys(("name", "ca_pem", "cert_pem", "key_pem"), "x")
    private = {**found.secret, "base_env": {}, "identities": {"controller": certificate}}
    (config.parent / "private.json").write_text(json.dumps(private))

    settings = load_controller(config.parent / "controller.json", LISTENS)
    room = Plans(settings).room()
    state = initial_state(settings.hosts, setup=False, provisioned=settings.provisioned)
    assert plan_scale(state, Plans(settings).limits, 4, room).homes == homes


def test_a_head_of_another_version_or_without_its_secret_is_refused(tmp_path):
    found = away(tmp_path, planned())
    told = {"SKY_MONARCH_HOST": json.dumps(found.told), "SKY_MONARCH_ENROLMENT": found.enrolment()}

    with pytest.raises(ConfigError, match=r"host head has sky-monarch 9.9.9, the run was launched by 0.1.0"):
        documents(dict(told), version="9.9.9")
    with pytest.raises(ConfigError, match="SKY_MONARCH_ENROLMENT is not set"):
        become_head(tmp_path / "head", {"SKY_MONARCH_HOST": told["SKY_MONARCH_HOST"]}, version="0.1.0")
    broken = base64.b64encode(b'{"token": "canary"}').decode()
    with pytest.raises(ConfigError, match="makes no sense") as caught:
        become_head(tmp_path / "head", {**told, "SKY_MONARCH_ENROLMENT": broken}, version="0.1.0")
    assert "canary" not in str(caught.value)
    assert not (tmp_path / "head").exists()


def test_what_no_variable_holds_is_refused_before_anything_is_launched():
    with pytest.raises(ConfigError, match="would reach demo-head as") as caught:
        planned(K8S + f"setup: echo {'x' * 100_000}\n")
    assert "head: here" in (caught.value.hint or "")


def test_candidates_elsewhere_than_the_head_are_left_out_since_it_does_not_move():
    spec = job(
        "resources: {accelerators: MI300X:1,"
        " ordered: [{infra: k8s/a, use_spot: true}, {infra: k8s/a}, {infra: k8s/b}]}\n"
    )

    found = launchable(spec, plan_clusters(spec))

    assert [(choice.infra, choice.use_spot) for choice in found.choices] == [
        ("k8s/a", True),
        ("k8s/a", False),
    ]
    assert "elsewhere than their head, demo-head on k8s/a" in found.left_out[0]


def test_hosts_are_launched_in_the_network_of_the_head():
    choices = tuple(choice.to_json() for choice in planned().choices)

    (moved,) = pinned(choices, "k8s/ctx")

    assert moved["infra"] == "k8s/ctx"
    assert {one["task"]["resources"]["infra"] for one in moved["tasks"]} == {"k8s/ctx"}
    assert pinned(choices, None) is choices


@pytest.mark.parametrize(
    ("planned_for", "head", "place"),
    [
        ("oci", "oci/us-sanjose-1/AD-1", "oci/us-sanjose-1"),
        ("oci/us-sanjose-1", "oci/us-sanjose-1/AD-1", "oci/us-sanjose-1"),
        ("oci/us-sanjose-1/AD-2", "oci/us-sanjose-1/AD-2", "oci/us-sanjose-1/AD-2"),
        ("do", "do/nyc2", "do/nyc2"),
        ("slurm", "slurm/alps/cpu", "slurm/alps"),
        ("slurm/alps/gpu", "slurm/alps/gpu", "slurm/alps/gpu"),
        ("k8s", "k8s/arn:aws:eks:1/team", "k8s/arn:aws:eks:1/team"),
    ],
)
def test_the_zone_of_the_head_is_not_that_of_the_gpus(planned_for, head, place):
    task = {"resources": {"infra": planned_for}}
    choices = ({"infra": planned_for, "tasks": [{"cluster": "demo-h0", "task": task}]},)

    (found,) = pinned(choices, head)

    assert (found["infra"], found["tasks"][0]["task"]["resources"]["infra"]) == (place, place)


def test_what_may_still_bill_of_an_ended_run_is_every_cluster_whose_end_nobody_saw_the_head_too(tmp_path):
    folder = tmp_path / "runs" / "demo-1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(dict(planned().head.run_json)))
    told = [{"host": "demo-h0", "phase": "DOWN"}, {"host": "demo-h1", "phase": "UP"}]
    final = {"run_id": "demo-1", "state": "CANCELLED", "hosts": told}

    (folder / "final.json").write_text(json.dumps(final))
    assert Run(RunFolder(folder)).may_bill() == ("demo-h1", "demo-head")
    told.append({"host": "demo-head", "phase": "DOWN"})
    heads = {"host": "demo-head", "attempt": 1, "phase": "up", "choice": 0}
    (folder / "requests.json").write_text(json.dumps({"hosts": {"demo-head": heads}}))
    (folder / "final.json").write_text(json.dumps(final))
    assert Run(RunFolder(folder)).may_bill() == ("demo-h1",)


def test_a_run_with_a_head_elsewhere_lives_whether_or_not_anything_of_it_runs_here(tmp_path):
    folder = tmp_path / "runs" / "demo-1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(dict(planned().head.run_json)))
    run = RunFolder(folder)

    assert run.phase() is Phase.LOST, "nobody launches it, and nobody knows a way to its head"
    run.door.write_text("{}")
    assert run.phase() is Phase.LIVE
    assert "its head is the cluster demo-head" in (run.holder() or "")
    (folder / "final.json").write_text("{}")
    assert run.phase() is Phase.ENDED
