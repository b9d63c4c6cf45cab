"""A Slurm cluster of one machine: munged and slurmctld, a login node with sshd, and nodes that can be killed.

Its GPUs are SIMULATED: GRES on clones of /dev/null, with that word in their path and in each node's features.
Everything listens on 127.0.0.1. A node's address is 127.0.0.1 with a port of its own: `srun` is called back at the
address that a request came from, which on loopback is always that one.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.layout import USER, Layout, make_layout
from tests.e2e.machine import Machine
from tests.e2e.scratch import make_scratch, remove_scratch
from tests.support.waiting import eventually

CLUSTER = "loop"
TRAIN, URGENT = "train", "urgent"
GRACE_S = 15
GPU = "mi300x"
SKY = "0.14.1"
NEEDED = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "munged": "munge",
    "sshd": "openssh-server",
    "rsync": "rsync",
    "unshare": "util-linux",
    "setpriv": "util-linux",
}
_PATH = os.pathsep.join(filter(None, [os.environ.get("PATH"), "/usr/sbin", "/sbin"]))
#: What nodes need to reach a package index, where this machine needs it.
_PASSED_ON = (
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "PIP_INDEX_URL",
    "UV_INDEX_URL",
)

_SLURM = """
ClusterName={cluster}
SlurmctldHost=ctl(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/state/slurmctld.pid
SlurmdPidFile={root}/spool/%n/slurmd.pid
# No control groups: where this runs they are often not ours.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
SlurmdParameters=config_overrides
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SchedulerParameters=sched_interval=2,batch_sched_delay=0,sched_min_interval=100000
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=5
MinJobAge=30
InactiveLimit=0
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
"""
_PARTITIONS = """
PartitionName={train} Nodes=ALL Default=YES State=UP MaxTime=2:00:00 PriorityTier=1 PreemptMode=CANCEL GraceTime={grace}
PartitionName={urgent} Nodes=ALL State=UP MaxTime=1:00:00 PriorityTier=10 PreemptMode=OFF
"""
_NODE = (
    "NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=64000 "
    "Gres=gpu:{gpu}:{gpus} Feature=SIMULATED State=UNKNOWN\n"
)
_SSHD = """
ListenAddress 127.0.0.1:{port}
HostKey {root}/ssh/host
PidFile none
AuthorizedKeysFile {root}/ssh/authorized_keys
AllowUsers {user}
StrictModes no
UsePAM no
PasswordAuthentication no
PrintMotd no
MaxSessions 200
MaxStartups 150:30:200
SetEnv {variables}
Subsystem sftp internal-sftp
"""


class NotHereError(Exception):
    """This machine cannot be a cluster; says what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job, as ``squeue`` shows it.

    Attributes:
        number: Its id.
        name: Its name; of a SkyPilot cluster that name and a hash of the user.
        partition: Where it was submitted.
        state: ``RUNNING``, ``PENDING``, ``COMPLETING``, …
        node: Where it runs; empty where it does not.
    """

    number: int
    name: str
    partition: str
    state: str
    node: str


def check_this_machine() -> None:
    """Refuse where something is missing.

    Raises:
        NotHereError: What, and how to get it.
    """
    if os.geteuid():
        raise NotHereError("a cluster of namespaces is made by root only: run this as root")
    missing = {package for program, package in NEEDED.items() if not shutil.which(program, path=_PATH)}
    if missing:
        raise NotHereError(f"programs are missing here: apt-get install {' '.join(sorted(missing))}")
    made = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "true"], capture_output=True
    )
    if made.returncode:
        raise NotHereError(f"this machine lets nobody make namespaces: {made.stderr.decode().strip()}")


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Slurm:
    """A cluster, from ``start`` to ``close``.

    Args:
        nodes: How many nodes.
        gpus: SIMULATED GPUs of each.

    Attributes:
        root: Folder of everything; there until ``close``.
        ssh_port: Where the login node is reached.
        nodes: Names of the nodes.
    """

    def __init__(self, nodes: int = 4, gpus: int = 1) -> None:
        check_this_machine()
        self.root = make_scratch()
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self.ssh_port = free_port()
        self._gpus = gpus
        self._machines: dict[str, Machine] = {}
        self._layout: Layout | None = None

    @property
    def layout(self) -> Layout:
        """Its files."""
        assert self._layout is not None, "not started"
        return self._layout

    @property
    def key(self) -> Path:
        """The private key that its login node takes."""
        return self.root / "ssh/id"

    def start(self) -> None:
        """Bring everything up; returns when every node is idle."""
        with ExitStack() as undo:
            undo.callback(self.close)
            self._layout = make_layout(self.root, ("ctl", "login", *self.nodes))
            self._write_slurm()
            self._write_ssh()
            self._start("ctl", _CONTROL.format(root=self.root, user=USER, cache=self.layout.cache, sky=SKY))
            self._start("login", _LOGIN.format(root=self.root))
            for node in self.nodes:
                self.start_node(node, wait=False)
            for node in self.nodes:
                self.wait_for_node(node, "idle")
            eventually(self._sshd_answers, within_s=10, what="sshd answers")
            undo.pop_all()

    def close(self) -> None:
        """End everything and remove it; once more is no mistake."""
        for machine in self._machines.values():
            machine.kill()
        remove_scratch(self.root)

    # Nodes

    def start_node(self, node: str, *, wait: bool = True) -> None:
        """Switch a node on."""
        self._start(node, _NODE_DAEMON.format(root=self.root))
        if wait:
            self.wait_for_node(node, "idle")

    def kill_node(self, node: str, *, wait: bool = True) -> None:
        """Switch a node off without a word: every process on it is gone when this returns, or dies meanwhile."""
        self._machines[node].kill(wait=wait)

    def node(self, node: str) -> Machine:
        """The machine that a node is."""
        return self._machines[node]

    def node_state(self, node: str) -> str:
        """``idle``, ``mixed``, ``allocated``, ``down*``, …"""
        # Slurm 22.05 counts a node's processors anew for `scontrol show`. `sinfo` shows the last count: "mixed" for
        # good after a job that ended in the wrong second.
        self.command("scontrol", "show", "node", node)
        return self.command("sinfo", "--noheader", "--nodes", node, "--format", "%T").split("\n")[0].strip()

    def wait_for_node(self, node: str, *states: str, within_s: float = 60) -> None:
        """Wait until a node is in one of ``states``."""
        machine = self._machines[node]

        def there() -> bool:
            state = self.node_state(node)
            if not machine.runs and "down" not in " ".join(states):
                raise RuntimeError(f"{node} has ended:\n{machine.end_of_log()}")
            assert state.rstrip("*") in states, state
            return True

        eventually(there, within_s=within_s, every_s=0.2, what=f"{node} is {' or '.join(states)}")

    # Jobs

    def command(self, *argv: str) -> str:
        """Run a program of Slurm, and return what it printed."""
        done = subprocess.run(
            argv,
            env={"PATH": _PATH, "SLURM_CONF": str(self.root / "slurm.conf")},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"{' '.join(argv)}: {done.stderr.strip()}")
        return done.stdout

    def jobs(self, *, named: str = "") -> list[Job]:
        """The queue: everything that has not ended, of the names that begin with ``named``."""
        lines = self.command("squeue", "--noheader", "--format", "%i|%j|%P|%T|%N").splitlines()
        fields = (line.split("|") for line in lines)
        found = [
            Job(number=int(number), name=name, partition=partition, state=state, node=node)
            for number, name, partition, state, node in fields
        ]
        return [job for job in found if job.name.startswith(named)]

    def take(self, node: str) -> int:
        """Take a node for something urgent: what trains there is pre-empted, with ``GRACE_S`` to leave."""
        return self.submit(node, "sleep infinity", partition=URGENT)

    def submit(self, node: str, script: str, *, partition: str = TRAIN, name: str = "other") -> int:
        """Submit a job that wants the whole of one node, and return its id."""
        words = [
            "--partition",
            partition,
            "--nodelist",
            node,
            "--exclusive",
            "--no-requeue",
            "--job-name",
            name,
        ]
        places = ["--chdir", "/", "--output", "/dev/null"]
        said = self.command("sbatch", "--parsable", *words, *places, "--wrap", script)
        return int(said.split(";")[0])

    def cancel(self, *numbers: int) -> None:
        """Cancel jobs; returns when they have left the queue."""
        self.command("scancel", *map(str, numbers))
        eventually(
            lambda: not {job.number for job in self.jobs()} & set(numbers),
            within_s=40,
            every_s=0.2,
            what=f"jobs {numbers} leave the queue",
        )

    # How it is made

    def _start(self, name: str, daemons: str) -> None:
        env = {"PATH": self.layout.path, "SLURM_CONF": str(self.root / "slurm.conf"), "LANG": "C.UTF-8"}
        script = self.layout.script(name, daemons)
        self._machines[name] = Machine(name, script, log=self.root / "log" / name, env=env)

    def _write_slurm(self) -> None:
        for folder in ("state", "munge", "simulated"):
            (self.root / folder).mkdir()
        for node in self.nodes:
            (self.root / "spool" / node).mkdir(parents=True)
        key = self.root / "munge/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (self.root / "munge").chmod(0o711)
        head = _SLURM.format(cluster=CLUSTER, port=free_port(), root=self.root)
        partitions = _PARTITIONS.format(train=TRAIN, urgent=URGENT, grace=GRACE_S)
        nodes = [_NODE.format(name=node, port=free_port(), gpu=GPU, gpus=self._gpus) for node in self.nodes]
        (self.root / "slurm.conf").write_text(f"{head}{''.join(nodes)}{partitions}")
        # slurmd takes devices only, and refuses a plain file.
        for number in range(self._gpus):
            device = self.root / f"simulated/gpu{number}"
            os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
            device.chmod(0o666)
        last = self._gpus - 1
        devices = f"{self.root}/simulated/gpu{f'[0-{last}]' if last else '0'}"
        (self.root / "gres.conf").write_text(f"Name=gpu Type={GPU} File={devices} Flags=amd_gpu_env\n")

    def _write_ssh(self) -> None:
        folder = self.root / "ssh"
        folder.mkdir(mode=0o711)
        for name in ("host", "id"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)],
                check=True,
                timeout=20,
            )
        (folder / "authorized_keys").write_bytes((folder / "id.pub").read_bytes())
        (folder / "authorized_keys").chmod(0o644)
        variables = {
            "PATH": self.layout.path,
            "SLURM_CONF": str(self.root / "slurm.conf"),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            **{name: os.environ[name] for name in _PASSED_ON if os.environ.get(name)},
        }
        said = " ".join(f"{name}={value}" for name, value in variables.items())
        text = _SSHD.format(port=self.ssh_port, root=self.root, user=USER, variables=said)
        (folder / "sshd_config").write_text(text)

    def _sshd_answers(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex(("127.0.0.1", self.ssh_port)) == 0


_CONTROL = """
munged --foreground --force --key-file={root}/munge/key --socket={root}/munge/socket \
  --pid-file={root}/munge/pid --seed-file={root}/munge/seed &
for _ in $(seq 100); do [ -S {root}/munge/socket ] && break; sleep 0.05; done
slurmctld -D -i &
# What SkyPilot installs on each node, fetched once for all of them, while its API server begins.
setpriv --reuid {user} --regid {user} --clear-groups env HOME={root}/home UV_CACHE_DIR={cache} sh -c '
  uv venv -q /tmp/warm
  uv pip install -q --link-mode symlink --python /tmp/warm/bin/python "skypilot[slurm,remote]=={sky}" "setuptools<70"
' || echo "the cache of uv stays cold"
wait -n
"""
_LOGIN = """
mount -t tmpfs -o mode=755 login /run
mkdir -m 755 /run/sshd
"$(PATH=$PATH:/usr/sbin command -v sshd)" -D -e -f {root}/ssh/sshd_config &
wait
"""
_NODE_DAEMON = """
for _ in $(seq 200); do [ -S {root}/munge/socket ] && break; sleep 0.05; done
slurmd -D &
wait
"""
