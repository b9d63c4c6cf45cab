"""A rank that says that it waits for others, and does so for ever: ``python -m tests.support.stuck_waiter``.

All groups begin together, however long each of them takes to start.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from sky_monarch.training.agent_link import AgentLink
from sky_monarch.training.environment import RankEnvironment

STEPS = 20
MEET_S = 60.0


def main() -> None:
    link = AgentLink(
        RankEnvironment.read(), target_step=STEPS, on_dead=lambda _: None, wait_limits_s=(60.0, 2.0)
    )
    if os.environ["SKY_MONARCH_GENERATION"] == "1":
        meet(int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"]))
    for step in range(1, STEPS + 1):
        time.sleep(0.02)
        link.committed(step, 1, 1, {})
        if step == 5 and os.environ["SKY_MONARCH_GENERATION"] == "1":
            with link.waiting():
                time.sleep(3600)
    link.done(STEPS)
    link.released.wait(60)
    link.close()


def meet(replica: int, replicas: int) -> None:
    Path(f"begun-{replica}").touch()
    deadline = time.monotonic() + MEET_S
    while not all(Path(f"begun-{one}").exists() for one in range(replicas)) and time.monotonic() < deadline:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
