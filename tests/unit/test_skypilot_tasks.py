"""The tasks of a plan, read by the real SkyPilot. Skipped where it is not installed: it weighs more than we do.

An environment of its own serves: ``python -m venv .venv-sky`` and into it ``skypilot`` (``constraints.txt``) and this
package. SkyPilot's catalogs come from the network; here they are written from our own offers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sky_monarch.config import check_job, load_job
from sky_monarch.launch.cluster_plan import plan_clusters
from sky_monarch.launch.offers import known_offers
from sky_monarch.launch.yaml_text import yaml_text
from sky_monarch.sdk.actor_hosts import hosts_job

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / ".venv-sky/bin/python"
PYTHON = sys.executable if importlib.util.find_spec("sky") else str(OWN) if OWN.exists() else None

pytestmark = [
    pytest.mark.sky,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        PYTHON is None, reason="SkyPilot is not installed here (pip install 'sky-monarch[sky]', or .venv-sky)"
    ),
]

JOBS = [
    "infra: runpod\nresources: {accelerators: MI300X:2, ordered: [{use_spot: true}, {}]}",
    "infra: oci\nresources: {accelerators: MI300X:16}",
    "infra: oci\nresources: {accelerators: MI355X:8, cpus: 8+}",
    "infra: do\nresources: {accelerators: MI300X:1}",
    "infra: azure\nresources: {accelerators: MI300X:2, use_spot: true}",
    "infra: k8s\nresources: {accelerators: MI300X:8, memory_gib: 64+}",
    "infra: slurm\nresources: {accelerators: MI300X:2}",
    "infra: ssh\nresources: {accelerators: MI325X:4}",
]

#: SkyPilot's own names.
CLOUDS = {
    "runpod": "RunPod",
    "oci": "OCI",
    "azure": "Azure",
    "do": "DO",
    "k8s": "Kubernetes",
    "slurm": "Slurm",
    "ssh": "SSH",
}

#: Reads tasks as YAML, as `sky launch` does, and says what SkyPilot made of each.
READER = """
import json, sys, yaml
import sky
from sky import clouds
from sky_monarch.launch import skypilot

said = []
for text in json.load(sys.stdin):
    config = yaml.safe_load(text)
    task = sky.Task.from_yaml_config(dict(config))
    (resources,) = task.resources
    required = resources.get_required_cloud_features()
    if task.num_nodes > 1:
        required = {*required, clouds.CloudImplementationFeatures.MULTI_NODE}
    unsupported = type(resources.cloud)._unsupported_features_for_resources(resources)
    entry = {
        "name": task.name,
        "num_nodes": task.num_nodes,
        "cloud": str(resources.cloud),
        "accelerators": resources.accelerators,
        "use_spot": resources.use_spot,
        "image": resources.extract_docker_image(),
        "envs": task.envs,
        "secrets": task.secrets,
        "missing": sorted(str(feature) for feature in required if feature in unsupported),
    }
    if entry["cloud"] in ("RunPod", "OCI", "Azure", "DO"):
        verdict = skypilot.look_up(config)
        entry["found"], entry["reason"] = verdict.found, verdict.reason
    said.append(entry)
FEATURES = {
    "spot": "SPOT_INSTANCE",
    "multi_node": "MULTI_NODE",
    "docker": "DOCKER_IMAGE",
    "network_tier": "CUSTOM_NETWORK_TIER",
    "ports": "OPEN_PORTS",
    "autodown": "AUTODOWN",
}
declared = {}
for name in ("RunPod", "OCI", "Azure", "DO", "Slurm", "Kubernetes", "SSH"):
    cloud = getattr(clouds, name)
    given = cloud._unsupported_features_for_resources(sky.Resources(infra=name.lower()))
    declared[name] = {
        field: getattr(clouds.CloudImplementationFeatures, feature) not in given
        for field, feature in FEATURES.items()
    }
from sky_monarch.launch.notices import preemption_hook
hook = preemption_hook(python="python", directory="$HOME/x")
config = {"run": "x", "resources": {"infra": "k8s"}, "config": {"hooks": [hook]}}
(resources,) = sky.Task.from_yaml_config(config).resources
print("SAID " + json.dumps([said, declared, [hook, resources.hooks]]))
"""


def write_catalogs(home: Path) -> None:
    """SkyPilot's catalogs with our offers in them, as if they had been fetched."""
    folder = home / ".sky/catalogs/v8"
    (folder / "common").mkdir(parents=True)
    rows = []
    for cloud in known_offers().clouds.values():
        if not cloud.offers or not cloud.plannable:
            continue
        lines = [
            "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone"
        ]
        for offer in cloud.offers:
            price, spot = offer.usd_per_hour or 1.0, (offer.usd_spot_per_hour or 1.0) if offer.spot else ""
            lines.append(f"{offer.instance},{offer.gpu},{offer.count},96,1800,,{price},{spot},r1,z1")
            rows.append(f"{offer.gpu},{CLOUDS[cloud.name]}")
        # A host without GPUs, for heads.
        lines.append("cpu-8,,,8,32,,0.3,0.1,r1,z1")
        (folder / cloud.name).mkdir()
        (folder / cloud.name / "vms.csv").write_text("\n".join(lines) + "\n")
        (folder / cloud.name / "images.csv").write_text("Tag,Region,OS,OSVersion,ImageId,CreationDate\n")
    models = {}
    for row in rows:
        gpu, cloud_name = row.split(",")
        models.setdefault(gpu, set()).add(cloud_name)
    text = "".join(f'{gpu},"{sorted(found)}"\n' for gpu, found in sorted(models.items()))
    (folder / "common/accelerators.csv").write_text("AcceleratorName,Clouds\n" + text)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """``[(choice, cluster, task, what SkyPilot says)]``, and what it declares: SkyPilot is started once."""
    home = tmp_path_factory.mktemp("home")
    write_catalogs(home)
    jobs = [load_job(f"name: demo\nreplicas: 4\nranks_per_replica: 2\nrun: x\n{text}\n") for text in JOBS]
    # Hosts for actors: `sky_monarch.launch_hosts`.
    jobs += [
        hosts_job(
            2,
            {"name": "actors", "workdir": "/tmp", "infra": infra, "resources": {"accelerators": "MI300X:8"}},
            keys="c2VjcmV0",
            python="python",
            dial="10.0.0.1:2222",
        )
        for infra in ("slurm", "k8s", "oci")
    ]
    jobs += [check_job(path).job for path in sorted((ROOT / "task_templates").glob("*.yaml"))]
    given = [
        (choice, cluster, task)
        for job in jobs
        if job is not None
        for choice in plan_clusters(job).choices
        for cluster, task in choice.documents()
    ]
    env = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
    done = subprocess.run(
        [str(PYTHON), "-c", READER],
        input=json.dumps([yaml_text(task) for _, _, task in given]),
        env={**env, "HOME": str(home), "PYTHONPATH": str(ROOT), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("SAID "))
    answers, declared, hooks = json.loads(line.removeprefix("SAID "))
    return [(*entry, answer) for entry, answer in zip(given, answers, strict=True)], declared, hooks


@pytest.fixture
def said(answers):
    return answers[0]


def test_skypilot_takes_the_hook_for_preemption_as_it_is(answers):
    hook, registered = answers[2]
    assert registered == [hook]


@pytest.mark.parametrize("name", CLOUDS)
def test_the_snapshot_says_of_each_cloud_what_skypilot_declares(answers, name):
    declared, cloud = answers[1][CLOUDS[name]], known_offers().clouds[name]

    # Slurm runs images where its site has Pyxis: a plan does not count on that. Kubernetes itself is asked for spot.
    skipped = {"slurm": {"docker"}, "k8s": {"spot"}, "ssh": {"spot"}}.get(name, set())
    assert {field: getattr(cloud, field) for field in declared if field not in skipped} == {
        field: value for field, value in declared.items() if field not in skipped
    }


def test_skypilot_reads_every_task_as_it_is_meant(said):
    for choice, cluster, task, answer in said:
        assert answer["name"] == cluster
        assert answer["num_nodes"] == task["num_nodes"]
        name, _, count = (task["resources"].get("accelerators") or "").partition(":")
        assert answer["accelerators"] == ({name: int(count)} if name else None)
        assert answer["use_spot"] == task["resources"].get("use_spot", False)
        image = task["resources"].get("image_id")
        assert answer["image"] == (image and image.removeprefix("docker:"))
        assert answer["cloud"] == CLOUDS[choice.infra.partition("/")[0]]


def test_no_task_asks_a_cloud_for_what_it_does_not_have(said):
    asked = {
        (cluster, answer["cloud"]): answer["missing"] for _, cluster, _, answer in said if answer["missing"]
    }

    assert asked == {}


def test_no_secret_and_none_of_the_jobs_variables_are_in_a_task(said):
    for _, _, task, answer in said:
        assert answer["secrets"] in (None, {})
        assert answer["envs"] in (task.get("envs", {}), None)


def test_skypilot_finds_the_host_that_the_plan_names_at_its_price(said):
    checked = 0
    for choice, cluster, task, answer in said:
        if choice.instance is None or (cluster == choice.head.cluster and choice.head.own):
            continue
        found = dict(map(tuple, answer["found"]))
        assert choice.instance in found, answer["reason"]
        if choice.usd_per_hour is not None:
            hosts = choice.usd_per_hour - (choice.head_usd_per_hour or 0.0)  # a head has a price of its own
            each = hosts / len(choice.hosts)
            assert found[choice.instance] == pytest.approx(each * task["num_nodes"])
            checked += 1
    assert checked >= 5


def test_what_skypilot_prints_is_no_part_of_a_plan(tmp_path: Path) -> None:
    job = (
        "name: demo\nreplicas: 1\ninfra: runpod\nhead: here\nresources: {accelerators: MI300X:1}\nrun: echo\n"
    )
    (tmp_path / "job.yaml").write_text(job)
    # No catalogs are there, and none can be fetched: SkyPilot prints that it tries.
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "SKY_MONARCH_STATE_DIR": str(tmp_path / "state"),
        "HTTPS_PROXY": "http://127.0.0.1:9",
    }
    words = [str(PYTHON), "-m", "sky_monarch", "plan", "--sky", "--json", "job.yaml"]
    done = subprocess.run(
        words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True, timeout=240
    )
    (verdict,) = json.loads(done.stdout)["skypilot"]
    assert verdict["found"] == []
    assert "runpod" in verdict["reason"]
    assert "payload" not in done.stderr
