"""Runs on the cluster, as its user has them: through the CLI, with the settings of one home."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sky_monarch.config import load_job
from tests.e2e.site import Site
from tests.e2e.slurm import CLUSTER, TRAIN, Job
from tests.support import free_rank
from tests.support.processes import with_variable
from tests.support.runs import ENDED, ROOT, Workbench
from tests.support.waiting import HopelessError, eventually

INFRA = f"slurm/{CLUSTER}/{TRAIN}"
REPLICAS = 3
_STEP = re.compile(rb"^step (\d+) at ([\d.]+) quorum (\d+) participants (\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that a torch-free rank committed.

    Attributes:
        number: Which.
        at_s: When, by the clock of ``time.monotonic()``, which nodes share with this machine.
        quorum_id: In which quorum.
        participants: Of how many groups.
    """

    number: int
    at_s: float
    quorum_id: int
    participants: int


class Client(Workbench):
    """A user of the cluster.

    Args:
        site: The cluster and its SkyPilot.
    """

    def __init__(self, site: Site) -> None:
        folder = site.slurm.root / "work"
        folder.mkdir()
        super().__init__(folder, extra_env=site.sky.env)
        # What lies beside a job file is shipped with it, and the state of runs is no part of that.
        self.home = site.slurm.root / "state-home"
        self.env["SKY_MONARCH_STATE_DIR"] = str(self.home)
        self._slurm = site.slurm

    def free_job(self, name: str, *, step_s: float = 0.1, **fields: Any) -> Path:
        """A job file of torch-free ranks that go on for ever and heed a notice."""
        folder = self.folder / name
        folder.mkdir()
        shutil.copy(str(free_rank.__file__), folder / "free_rank.py")
        # Hosts come minutes apart on a busy machine; a session waits for the others as long as it takes, too.
        run = f"python free_rank.py --heed --steps 10000000 --step-s {step_s} --quorum-timeout-s 900"
        return self._job(
            folder, {"name": name, "run": run, "recovery": {"standby": 0, "grace_s": 3}, **fields}
        )

    def training_job(self, name: str, **fields: Any) -> Path:
        """The template for Slurm, on this cluster: the quickstart's model, without an end."""
        template = load_job((ROOT / "task_templates/slurm.yaml").read_text(encoding="utf-8")).public_dict()
        folder = self.folder / name
        folder.mkdir()
        run = re.sub(r"--steps \d+", "--steps 10000000", str(template["run"]))
        kept = {key: template[key] for key in ("preload",)}
        return self._job(folder, {**kept, "name": name, "run": run, **fields})

    def _job(self, folder: Path, fields: dict[str, Any]) -> Path:
        document = {
            "replicas": REPLICAS,
            "min_replicas": 2,
            "infra": INFRA,
            "resources": {"accelerators": "MI300X:1", "cpus": "2+", "memory_gib": "4+"},
            # The GPUs of these nodes are SIMULATED: none is found by who looks.
            "doctor": "off",
            **fields,
        }
        path = folder / f"{document['name']}.yaml"
        path.write_text(json.dumps(document, indent=1))
        return path

    def up(self, job: Path, *arguments: str, timeout_s: float = 120) -> str:
        """``up --yes --detach`` with the head on loopback, as the nodes are; returns the run's name.

        A head that is a job of the cluster has the address that it finds.
        """
        if json.loads(job.read_text()).get("head") != "cluster":
            arguments = ("--head-address", "127.0.0.1", *arguments)
        return super().up(job, "--yes", *arguments, timeout_s=timeout_s)

    def stream(self, into: Path, *arguments: str) -> subprocess.Popen[str]:
        """Start ``sky-monarch``, its output going to a file."""
        with into.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "sky_monarch", *arguments],
                env=self.env,
                cwd=self.folder,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
            )

    def host_jobs(self, name: str) -> dict[str, Job]:
        """The Slurm job of each host's newest attempt that holds a node or asks for one.

        The one before may still be on its way out beside it; never a third one.
        """
        attempts: dict[str, dict[int, Job]] = {}
        for job in self._slurm.jobs(named=f"{name}-h"):
            if job.name.startswith(f"{name}-head"):
                continue
            if job.state in ("RUNNING", "PENDING", "CONFIGURING"):
                host = re.match(rf"({re.escape(name)}-h\d+)(?:-a(\d+)(?=-|$))?", job.name)
                assert host, job
                mine = attempts.setdefault(host[1], {})
                number = int(host[2] or 1)
                assert number not in mine, f"two clusters of one attempt: {mine[number]}, {job}"
                mine[number] = job
                assert len(mine) <= 2, f"three clusters of {host[1]}: {mine}"
        return {host: mine[max(mine)] for host, mine in attempts.items()}

    def host_of(self, name: str, replica: int) -> str:
        """Name of the host that a group is on by now."""
        hosts = self.status(name)["hosts"]
        return str(next(host["host"] for host in hosts if replica in host["groups"]))

    def host(self, name: str, replica: int) -> dict[str, Any]:
        """What the status says of the host of a group."""
        hosts = self.status(name)["hosts"]
        return next(host for host in hosts if host["host"] == f"{name}-h{replica}")

    def rank_pid(self, name: str, replica: int, *, rank: int = 0, host: int | None = None) -> int:
        """Pid of a group's rank, as this machine numbers it; it is on host ``replica`` where none is given."""
        number = replica if host is None else host
        node = self._slurm.node(self.host_jobs(name)[f"{name}-h{number}"].node)
        inside = self.status(name)["groups"][replica]["ranks"][rank]["pid"]
        return next(here for here, there in node.processes().items() if there == inside)

    def requests(self, name: str) -> dict[str, Any]:
        """What the provisioner has written down."""
        text = (self.run_folder(name) / "requests.json").read_text(encoding="utf-8")
        found: dict[str, Any] = json.loads(text)
        return found

    def launched_beside(self, name: str, host: str, attempt: int) -> bool:
        """Whether an attempt at a host is asked of SkyPilot while what is left of the one before still goes."""
        requests = self.requests(name)
        newest, older = requests["hosts"].get(host) or {}, requests["older"]
        asked = newest.get("attempt") == attempt and newest.get("asked_ms") is not None
        return asked and any((one["host"], one["attempt"]) == (host, attempt - 1) for one in older)

    def wait_for_all(
        self, name: str, *, step: int = 1, within_s: float = 400, replicas: int = REPLICAS
    ) -> dict[str, Any]:
        """Wait until every group trains in a quorum of all and has committed ``step``; returns the status."""

        def probe() -> dict[str, Any]:
            status = self.status(name)
            if status["state"] in ENDED:
                raise HopelessError(f"the run is {status['state']}: {status['reason']}")
            assert len(status["groups"]) >= replicas, (status["state"], status["reason"])
            groups = status["groups"][:replicas]  # a run keeps those that it was scaled below
            seen = [(group["state"], group["step"], group["participants"]) for group in groups]
            told = (status["state"], status["reason"], status.get("hosts"), seen)
            assert all(
                state == "RUNNING" and (at or 0) >= step and members == replicas
                for state, at, members in seen
            ), told
            return status

        return eventually(probe, within_s=within_s, every_s=0.25, what=f"all groups of {name} train")

    def scale(self, name: str, replicas: int) -> None:
        """``scale NAME REPLICAS``."""
        done = self.cli("scale", name, str(replicas))
        assert done.returncode == 0, done.stdout + done.stderr

    def steps(self, name: str, replica: int) -> list[Step]:
        """What a group of torch-free ranks committed so far, all its generations in order."""
        done = self.cli("logs", name, "--replica", str(replica), "--rank", "0")
        assert done.returncode == 0, done.stderr
        return [
            Step(number=int(step), at_s=float(at), quorum_id=int(quorum), participants=int(members))
            for step, at, quorum, members in _STEP.findall(done.stdout.encode())
        ]

    def end(self, name: str) -> None:
        """``down``: no job in the queue and no process of the run is left, on no machine."""
        run_id = self.run_folder(name).name
        done = self.cli("down", name, "--grace", "3", timeout_s=240)
        assert done.returncode == 0, done.stdout + done.stderr
        eventually(
            lambda: not self._slurm.jobs(named=f"{name}-h"),
            within_s=30,
            every_s=0.2,
            what="the queue is empty",
        )
        eventually(
            lambda: not with_variable("SKY_MONARCH_RUN_ID", run_id), within_s=15, what="all have ended"
        )
        if name in self.names:
            self.names.remove(name)
