"""A rank that evaluates in parts, and says so of all and of each: ``python -m tests.support.pausing_rank SECONDS``."""

from __future__ import annotations

import sys
import time

from sky_monarch.training.agent_link import AgentLink
from sky_monarch.training.environment import RankEnvironment

STEPS = 20


def main() -> None:
    link = AgentLink(
        RankEnvironment.read(), target_step=STEPS, on_dead=lambda _: None, wait_limits_s=(60.0, 60.0)
    )
    for step in range(1, STEPS + 1):
        time.sleep(0.02)
        link.committed(step, 1, 1, {})
        if step == STEPS // 2:
            with link.pause("evaluation", 60.0):
                with link.pause("its first part", 0.5):
                    pass
                time.sleep(float(sys.argv[1]))
    link.done(STEPS)
    link.released.wait(60)
    link.close()


if __name__ == "__main__":
    main()
