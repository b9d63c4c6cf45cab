"""The same for hosts that reach nobody but the head. (``rust_core/tests/tunnel.rs`` has those of the tunnel itself.)"""

from __future__ import annotations

from tests.support.mutant import Mutant

_NET = "tests/net/test_tunnel.py::"

TUNNEL = [
    # Needs network namespaces, as its test does.
    Mutant(
        f"{_NET}test_groups_on_hosts_that_only_dial_out_average_heal_and_outlive_one_of_them",
        "the group is back",
        module="training/manager.py",
        old="        if quorum.heal:\n",
        new="        if False:\n",
    ),
]
