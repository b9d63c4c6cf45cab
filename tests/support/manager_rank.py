"""A rank that is an unmodified ``torchft.Manager`` and knows nothing of sky-monarch.

``python -m tests.support.manager_rank FOLDER`` commits steps until ``FOLDER/stop`` exists; each becomes a JSON line of
``FOLDER/r<replica>``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.manager_farm import train


def main() -> None:
    replica = int(os.environ["REPLICA_GROUP_ID"])
    order = {
        "replica": replica,
        "name": f"r{replica}",
        "lighthouse": os.environ["TORCHFT_LIGHTHOUSE"],
        "quorum_timeout_s": 30,
    }
    train(Path(sys.argv[1]), order)


if __name__ == "__main__":
    main()
