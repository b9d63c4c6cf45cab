"""The template for TorchTitan: planned by us, its flags read by TorchTitan's own parser where that is installed.

An environment of its own serves: ``python -m venv .venv-titan`` and into it ``torchtitan==0.3.0``, torch and torchft.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sky_monarch.config import check_job
from sky_monarch.config.command import rank_command
from sky_monarch.launch.cluster_plan import plan_clusters

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / ".venv-titan/bin/python"
PYTHON = sys.executable if importlib.util.find_spec("torchtitan") else str(OWN) if OWN.exists() else None

#: What TorchTitan makes of the flags, of those that must agree with the job.
READER = """
import json, os, sys
from torchtitan.config import ConfigManager

config = ConfigManager().parse_args(json.load(sys.stdin))
group = config.fault_tolerance
print("SAID " + json.dumps({
    "trainer": type(config).__qualname__,
    "model": [config.model_spec.name, config.model_spec.flavor],
    "enable": group.enable,
    "replica": group.replica_id,
    "groups": group.group_size,
    "least": group.min_replica_size,
    "collectives": group.process_group,
    "each_step": group.semi_sync_method is None,
    "shards": config.parallelism.data_parallel_shard_degree,
    "replicated_inside": config.parallelism.data_parallel_replicate_degree,
    "saves": config.checkpoint.enable,
    "saver": type(config.checkpoint).__qualname__,
    "optimizer": type(config.optimizer).__qualname__,
    "graphs": not config.training.disable_cuda_graphs,
    "folders": [config.hf_assets_path, config.dump_folder],
}), flush=True)
os._exit(0)  # what it has imported takes long to end
"""


@pytest.fixture(scope="module")
def job():
    job = check_job(ROOT / "task_templates/torchtitan-llama3.yaml").job
    assert job is not None
    return job


def words(job, replica: int) -> list[str]:
    """What the shell makes of ``run`` for a group."""
    known = {**job.private_values()["envs"], "REPLICA_GROUP_ID": str(replica)}
    text = job.run
    for name, value in known.items():
        text = text.replace(f'"${name}"', shlex.quote(value))
    assert "$" not in text
    return shlex.split(text)


def test_its_groups_have_a_host_each_and_its_flags_say_what_the_job_says(job):
    (choice,) = plan_clusters(job).choices
    assert [host.groups for host in choice.hosts] == [(0,), (1,), (2,), (3,)]
    assert choice.accelerator == "MI300X:8"
    assert rank_command(job.run)["kind"] == "shell", "the group's number is the shell's to fill in"
    flags = words(job, 3)
    value = dict(itertools.pairwise(flags))
    assert flags[:4] == ["exec", "python", "-m", "torchtitan.train"], "its TERM reaches Python"
    assert value["--fault_tolerance.group_size"] == str(job.replicas)
    assert value["--fault_tolerance.min_replica_size"] == str(job.min_replicas)
    assert value["--parallelism.data_parallel_shard_degree"] == str(job.ranks_per_replica)
    assert value["--fault_tolerance.replica_id"] == "3"


@pytest.mark.slow
@pytest.mark.timeout(330)
@pytest.mark.skipif(
    PYTHON is None, reason="TorchTitan is not installed here (torchtitan==0.3.0, or .venv-titan)"
)
def test_torchtitans_own_parser_takes_its_flags(job):
    done = subprocess.run(
        [str(PYTHON), "-c", READER],
        input=json.dumps(words(job, 2)[4:]),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("SAID "))
    assert json.loads(line.removeprefix("SAID ")) == {
        "trainer": "FaultTolerantTrainer.Config",
        "model": ["torchft/llama3", "8B"],
        "enable": True,
        "replica": 2,
        "groups": 4,
        "least": 2,
        "collectives": "nccl",
        "each_step": True,
        "shards": 8,
        "replicated_inside": 1,
        "saves": True,
        "saver": "TorchFTCheckpointManager.Config",
        "optimizer": "TorchFTOptimizersContainer.Config",
        "graphs": False,
        "folders": ["/shared/Llama-3.1-8B", "/shared/torchtitan-llama3"],
    }
