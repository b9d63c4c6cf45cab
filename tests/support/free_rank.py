"""A rank that trains nothing: real process, real session, real lighthouse, no torch.

Rank 0 takes part in quorums as a TorchFT manager does; the other ranks only do the same number of steps.
It "trains" by sleeping, heals by jumping to the quorum's newest step, and reports each step. What goes wrong
with it, and where, is said on its command line::

    free_rank.py --steps 120 --step-s 0.05 --do 1:30:exit=3 --do 1:30:raise

Each ``--do REPLICA[/RANK]:STEP:WHAT`` happens in that rank (0 where none is named), in its first generation
only unless WHAT ends in ``!``. With ``--ease STEP:FILE`` steps take half a second from STEP on, until FILE is
there: what a test does meanwhile does not come after the end. Asked to leave, it dies of SIGTERM; with
``--heed`` it finishes its step first, as a session does.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sky_monarch import stacks
from sky_monarch.actors.agent_client import AgentClient
from sky_monarch.actors.lighthouse_client import LighthouseClient
from sky_monarch.errors import ChannelClosedError, ChannelError
from sky_monarch.standby import wait_for_promotion

_EASE_S = 0.5
_AWAIT_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument(
        "--ease", default="", help="from which step on to take half a second, until which file"
    )
    parser.add_argument("--do", action="append", default=[])
    parser.add_argument("--quorum-timeout-s", type=float, default=20.0)
    parser.add_argument("--heed", action="store_true")
    parser.add_argument("--save-s", type=float, default=0.0, help="what it takes to save, before it leaves")
    parser.add_argument("--ahead", default="", help="a deed while it runs ahead of its promotion, as of --do")
    options = parser.parse_args()

    if os.environ["SKY_MONARCH_GENERATION"] == "0":
        print(f"pid {os.getpid()} runs ahead")
        act(options.ahead)
    wait_for_promotion()
    replica, rank = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["RANK"])
    generation = int(os.environ["SKY_MONARCH_GENERATION"])
    own = f"{replica}/{rank}" if rank else str(replica)
    deeds = [deed.split(":", 2) for deed in options.do]
    mine = {
        int(step): what.rstrip("!")
        for who, step, what in deeds
        if who.removesuffix("/0") == own and (generation == 1 or what.endswith("!"))
    }

    print(f"rank {rank} of replica {replica} starts as generation {generation}, pid {os.getpid()}")
    if options.heed:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its agent says the same
    stacks.register()
    agent = AgentClient.from_env(target_step=options.steps)
    ears = Ears(agent)
    lighthouse = None
    if rank == 0:
        lighthouse = LighthouseClient(
            os.environ["TORCHFT_LIGHTHOUSE"], connect_timeout_s=options.quorum_timeout_s
        )
    name = f"rep_{replica}.g{generation}_{replica}:{uuid.uuid4()}"

    step = 0
    while step < options.steps:
        if options.heed and ears.asked_to_leave:
            print(f"leaves after step {step}")
            if options.save_s:
                agent.pause("leaving the quorum", options.save_s)
                time.sleep(options.save_s)
            ears.close()
            return 0
        act(mine.get(step), agent)
        if lighthouse is None:
            work(step, options.step_s, options.ease)
            step += 1
            agent.committed(step)
            continue
        with ears.excused():
            quorum = ask(lighthouse, name, step, timeout_s=options.quorum_timeout_s)
        newest = max(member["step"] for member in quorum["participants"])
        if newest > step:
            print(f"healed from step {step} to {newest}")
            step = newest
            if step >= options.steps:
                break
        work(step, options.step_s, options.ease)
        step += 1
        members = len(quorum["participants"])
        agent.committed(
            step, quorum_id=quorum["quorum_id"], participants=members, metrics={"loss": 1.0 / step}
        )
        now_s = time.monotonic()
        print(f"step {step} at {now_s:.3f} quorum {quorum['quorum_id']} participants {members}")
    agent.done(step)
    ears.released.wait(60)
    print(f"rank {rank} of replica {replica} is done at step {step}")
    ears.close()
    return 0


def work(step: int, step_s: float, ease: str) -> None:
    """Take the time of a step."""
    since, _, until = ease.partition(":")
    time.sleep(step_s if not until or step < int(since) or os.path.exists(until) else _EASE_S)  # noqa: PTH110


def ask(lighthouse: LighthouseClient, name: str, step: int, *, timeout_s: float) -> dict[str, Any]:
    """A quorum. Like TorchFT's manager, it asks again as often as it is told where the lighthouse dies."""
    retries = int(os.environ.get("TORCHFT_QUORUM_RETRIES", "0"))
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.1, deadline - time.monotonic())
        try:
            return lighthouse.quorum(name, step, world_size=int(os.environ["WORLD_SIZE"]), timeout_s=left_s)
        except ChannelClosedError:
            retries -= 1
            if retries < 0 or time.monotonic() > deadline:
                raise
            time.sleep(max(0.1, min(timeout_s, 20.0) / (retries + 1)))


class Ears(threading.Thread):
    """Hears the agent while the main thread works, as the link of a training session does."""

    def __init__(self, agent: AgentClient) -> None:
        super().__init__(name="ears", daemon=True)
        self.released = threading.Event()
        self.asked_to_leave = False
        self._agent = agent
        self._closed = threading.Event()
        self._waiting_since: float | None = None
        self.start()

    def run(self) -> None:
        while not self._closed.is_set():
            since = self._waiting_since
            try:
                if since is not None and time.monotonic() - since > 0.5:
                    self._agent.pause("waiting for other replica groups", 1.5)
                command = self._agent.recv(timeout_s=0.2)
            except ChannelError:
                return
            match command:
                case {"type": "release" | "drain" as what}:
                    self.asked_to_leave = what == "drain"
                    self.released.set()
                case {"type": "inject", "fault": "exit"}:
                    print("rehearses an exit", flush=True)
                    os._exit(1)

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Around a wait for others: the watchdog must find the one that hangs."""
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = None

    def close(self) -> None:
        """Be back from native code before Python shuts down."""
        self._closed.set()
        self.join(2)


def act(what: str | None, agent: AgentClient | None = None) -> None:
    """Go wrong in the way that ``what`` names; or, as ``pause=LIMIT/SECONDS``, be away for a while, and say so."""
    match (what or "").partition("="):
        case ("exit", _, code):
            sys.exit(int(code or 1))
        case ("quit", _, code):
            os._exit(int(code or 1))
        case ("raise", _, text):
            raise ValueError(text or "a mistake in the user's code")
        case ("kill", _, _):
            os.kill(os.getpid(), signal.SIGKILL)
        case ("sleep", _, seconds):
            time.sleep(float(seconds or 3600))
        case ("pause", _, times) if agent is not None:
            limit_s, away_s = map(float, times.split("/"))
            agent.pause("evaluation", limit_s)
            time.sleep(away_s)
            agent.pause("evaluation", 0.0)
        case ("await", _, path):
            deadline = time.monotonic() + _AWAIT_S
            while not os.path.exists(path) and time.monotonic() < deadline:  # noqa: PTH110
                time.sleep(0.01)
        case ("stop", _, _):
            os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    sys.exit(main())
