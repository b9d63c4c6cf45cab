"""A rank that says that it waits for others, and does so for ever: ``python -m tests.support.stuck_waiter``."""

from __future__ import annotations

import os
import time

from sky_monarch.training.agent_link import AgentLink
from sky_monarch.training.environment import RankEnvironment

STEPS = 20


def main() -> None:
    link = AgentLink(
        RankEnvironment.read(), target_step=STEPS, on_dead=lambda _: None, wait_limits_s=(60.0, 2.0)
    )
    for step in range(1, STEPS + 1):
        time.sleep(0.02)
        link.committed(step, 1, 1, {})
        if step == 5 and os.environ["SKY_MONARCH_GENERATION"] == "1":
            with link.waiting():
                time.sleep(3600)
    link.done(STEPS)
    link.released.wait(60)
    link.close()


if __name__ == "__main__":
    main()
