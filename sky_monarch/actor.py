"""The actor API: one program that drives many processes.

```python
from sky_monarch.actor import Actor, endpoint, this_host


class Counter(Actor):
    def __init__(self) -> None:
        self.n = 0

    @endpoint
    def add(self, n: int) -> int:
        self.n += n
        return self.n


procs = this_host().spawn_procs({"gpus": 4})
counters = procs.spawn("counters", Counter)
print(counters.add.call(1).get())                   # a ValueMesh: one answer a rank
print(counters.slice(gpus=0).add.call_one(1).get())
```

Nothing is imported before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sky_monarch.actors.actor import Actor, concurrent_endpoint, endpoint
    from sky_monarch.actors.actor_mesh import ActorMesh
    from sky_monarch.actors.attach import HostListener, attach_to_hosts
    from sky_monarch.actors.channel import Accumulator, Channel, Port, PortReceiver
    from sky_monarch.actors.communicator import Communicating, Communicator, DeviceBuffer
    from sky_monarch.actors.context import Context, context, current_rank, current_size
    from sky_monarch.actors.endpoint import Endpoint
    from sky_monarch.actors.failure import MeshFailure
    from sky_monarch.actors.future import Future
    from sky_monarch.actors.host_mesh import HostMesh, shutdown, shutdown_context, this_host, this_proc
    from sky_monarch.actors.keys import ActorKeys
    from sky_monarch.actors.lighthouse import Lighthouse
    from sky_monarch.actors.local_hosts import local_hosts
    from sky_monarch.actors.proc_mesh import ProcMesh
    from sky_monarch.actors.process_group import device_mesh, init_process_group
    from sky_monarch.actors.reference import Ref
    from sky_monarch.actors.replicas import ReplicaGroups
    from sky_monarch.actors.restarts import RestartPolicy
    from sky_monarch.actors.shape import Extent, Point, Region
    from sky_monarch.actors.sharded import ShardedTensor
    from sky_monarch.actors.spmd import setup_torch_elastic_env
    from sky_monarch.actors.value_mesh import ValueMesh
    from sky_monarch.errors import ActorError, DeadlockError, SupervisionError

_HOMES = {
    "Accumulator": "sky_monarch.actors.channel",
    "Actor": "sky_monarch.actors.actor",
    "ActorError": "sky_monarch.errors",
    "ActorKeys": "sky_monarch.actors.keys",
    "ActorMesh": "sky_monarch.actors.actor_mesh",
    "Channel": "sky_monarch.actors.channel",
    "Communicating": "sky_monarch.actors.communicator",
    "Communicator": "sky_monarch.actors.communicator",
    "Context": "sky_monarch.actors.context",
    "DeadlockError": "sky_monarch.errors",
    "DeviceBuffer": "sky_monarch.actors.communicator",
    "Endpoint": "sky_monarch.actors.endpoint",
    "Extent": "sky_monarch.actors.shape",
    "Future": "sky_monarch.actors.future",
    "HostListener": "sky_monarch.actors.attach",
    "HostMesh": "sky_monarch.actors.host_mesh",
    "Lighthouse": "sky_monarch.actors.lighthouse",
    "MeshFailure": "sky_monarch.actors.failure",
    "Point": "sky_monarch.actors.shape",
    "Port": "sky_monarch.actors.channel",
    "PortReceiver": "sky_monarch.actors.channel",
    "ProcMesh": "sky_monarch.actors.proc_mesh",
    "Ref": "sky_monarch.actors.reference",
    "Region": "sky_monarch.actors.shape",
    "ReplicaGroups": "sky_monarch.actors.replicas",
    "RestartPolicy": "sky_monarch.actors.restarts",
    "ShardedTensor": "sky_monarch.actors.sharded",
    "SupervisionError": "sky_monarch.errors",
    "ValueMesh": "sky_monarch.actors.value_mesh",
    "attach_to_hosts": "sky_monarch.actors.attach",
    "concurrent_endpoint": "sky_monarch.actors.actor",
    "context": "sky_monarch.actors.context",
    "current_rank": "sky_monarch.actors.context",
    "current_size": "sky_monarch.actors.context",
    "device_mesh": "sky_monarch.actors.process_group",
    "endpoint": "sky_monarch.actors.actor",
    "init_process_group": "sky_monarch.actors.process_group",
    "setup_torch_elastic_env": "sky_monarch.actors.spmd",
    "local_hosts": "sky_monarch.actors.local_hosts",
    "shutdown": "sky_monarch.actors.host_mesh",
    "shutdown_context": "sky_monarch.actors.host_mesh",
    "this_host": "sky_monarch.actors.host_mesh",
    "this_proc": "sky_monarch.actors.host_mesh",
}

__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorKeys",
    "ActorMesh",
    "Channel",
    "Communicating",
    "Communicator",
    "Context",
    "DeadlockError",
    "DeviceBuffer",
    "Endpoint",
    "Extent",
    "Future",
    "HostListener",
    "HostMesh",
    "Lighthouse",
    "MeshFailure",
    "Point",
    "Port",
    "PortReceiver",
    "ProcMesh",
    "Ref",
    "Region",
    "ReplicaGroups",
    "RestartPolicy",
    "ShardedTensor",
    "SupervisionError",
    "ValueMesh",
    "attach_to_hosts",
    "concurrent_endpoint",
    "context",
    "current_rank",
    "current_size",
    "device_mesh",
    "endpoint",
    "init_process_group",
    "local_hosts",
    "setup_torch_elastic_env",
    "shutdown",
    "shutdown_context",
    "this_host",
    "this_proc",
    "unhandled_fault_hook",
]


def unhandled_fault_hook(failure: MeshFailure) -> None:
    """What becomes of a failure that nobody handled: it is shown, once. Assign another function to change that.

    Whoever calls the mesh learns of it anyway: the call raises :class:`SupervisionError`.
    """
    import sys

    sys.stderr.write(failure.report() + "\n")


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
