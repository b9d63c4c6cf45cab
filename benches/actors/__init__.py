"""The actor runtime beside Monarch and Ray: calls, messages, meshes, payloads, deaths.

    make peers
    python -m benches actors [--figures rtt_call_us,…] [--rounds 6] [--seconds 1] [--deaths 300] [--peers monarch,ray]

Each peer is a process of its own, in an environment of its own, with meshes that stay up; all are up all the time and
measured in turns, now in one order, now in the other. So what changes with the machine in minutes changes for all. A
figure is the median over the rounds; ratios are ours to theirs within a round, with ``_low`` and ``_high`` the 95 %
interval over the rounds. A peer that is missing or fails makes the bench exit with 1.
``--figures`` (any of the names on the left) and ``--rounds`` make it shorter: deaths of the others take up to 35 s.

``…_cpu_…`` is processor time of the whole process tree, those that have died in it included. 8 processes, unless said
otherwise. Of us and of Monarch, all have plain methods as endpoints, called from the main thread of a script.

``rtt_call_us``            one call to another process and its answer, p50; ``_p99``, ``_min``
``msgs_per_s``             calls without answer to one process, with one call at the end that counts them
``pipelined_calls_per_s``  calls to one process, 100 on their way
``fanout_us``              one call to all processes and all answers, p50
``spawn_mesh_s``           until all processes have answered once
``payload_oneway_GBps``    64 MiB of numpy to a process that answers its length (``_bytes``: of bytes)
``payload_GBps``           64 MiB of bytes there and back, both ways counted (``_numpy``: of numpy)
``payload_tensor_GBps``    the same of a torch tensor in the host's memory, and ``payload_oneway_tensor_GBps``: of ours
                           alone, for Monarch and Ray are installed without torch
``…_tls_…``                of ours alone, too: with the 8 processes on two other hosts of this machine, reached over
                           TLS on loopback (``python -m benches actor_hosts`` has more of that)
``failure_detect_ms``      SIGKILL of a process until the call pending in it raises; ``_8``, a figure of its own, where
                           8 die at once. With it come ``failure_undetected``: of how many it did not within 35 s, as
                           which they count; and ``recover_ms``: SIGKILL until all whole-mesh calls work again and the
                           new rank has answered: in its old mesh, of ours from as many processes that stand by as the
                           mesh has; Monarch needs a new mesh. ``ended_ms``: until the kernel has ended the process,
                           before which nobody can know of its death
``scale_spawn_s``          32 processes, until all have answered once; ``scale_private_MiB``: of each, idle, the median
"""

from __future__ import annotations

from collections.abc import Sequence


def run(arguments: Sequence[str] = ()) -> int:
    """Measure; returns 1 where a peer is missing or did not get through.

    Args:
        arguments: Of the command line, without the bench's name.
    """
    # Not above: every actor of every peer imports this package, and is timed while it does.
    from benches.actors.comparison import compare

    return compare(arguments)
