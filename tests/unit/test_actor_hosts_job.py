"""The job that hosts for actors are, before anything is started."""

from __future__ import annotations

import json

import pytest

from sky_monarch.errors import ConfigError
from sky_monarch.launch.cluster_plan import plan_clusters
from sky_monarch.sdk.actor_hosts import hosts_job, launch_hosts

KEYS = "bm9ib2R5IG1heSBzZWUgdGhpcw=="


def job(count=3, **given):
    document = {"name": "actors", "workdir": "/tmp", **given}
    return hosts_job(count, document, keys=KEYS, python="python", dial="10.0.0.1:2222")


@pytest.mark.parametrize("infra", ["slurm/cluster/gpus", "k8s", "runpod", "oci"])
@pytest.mark.parametrize("accelerators", ["MI300X:8", "MI300X:2"])
def test_each_host_is_a_machine_of_its_own_and_the_keys_are_in_no_task(infra, accelerators):
    if (infra, accelerators) == ("oci", "MI300X:2"):
        with pytest.raises(ConfigError, match="no host"):
            plan_clusters(job(infra=infra, resources={"accelerators": accelerators}))
        return
    (choice, *_) = plan_clusters(job(infra=infra, resources={"accelerators": accelerators})).choices
    assert [host.groups for host in choice.hosts] == [(0,), (1,), (2,)]
    tasks = json.dumps([task for _, task in choice.documents()])
    assert KEYS not in tasks
    assert "actor_host" not in tasks, "what runs is said over the agents' own channel"


def test_the_keys_are_a_secret_of_the_job_and_each_host_dials_by_its_own_name():
    made = job(infra="slurm")
    assert KEYS not in json.dumps(made.public_dict())
    assert made.private_values()["secrets"] == {"ACTOR_KEYS": KEYS}
    assert "--dial 10.0.0.1:2222" in made.run
    assert '--name "actors-$SKY_MONARCH_REPLICA"' in made.run
    assert (made.ranks_per_replica, made.recovery.startup_limit_s) == (1, "off")


def test_hosts_elsewhere_have_what_classes_of_a_script_need_before_the_users_own_setup():
    assert job(infra="slurm", setup="echo mine").setup.splitlines()[-1] == "echo mine"
    assert "cloudpickle" in job(infra="slurm").setup
    assert not job(setup="").setup


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"run": "rm"}, "fields has run"),
        ({"secrets": {}, "name": "x"}, "fields has name, secrets"),
        ({"replica": 2}, "replica"),
        ({"budget": {"max_usd": -1}}, "max_usd"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_listens(fields, words, tmp_path, monkeypatch):
    monkeypatch.setattr("sky_monarch.actors.attach.HostListener", None)
    with pytest.raises(ConfigError, match=words):
        launch_hosts(2, workdir=str(tmp_path), fields=fields)
    with pytest.raises(ConfigError, match="0 hosts"):
        launch_hosts(0, workdir=str(tmp_path))
