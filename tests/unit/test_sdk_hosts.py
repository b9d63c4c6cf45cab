"""Hosts and their cost, as the SDK hands them on."""

from __future__ import annotations

import pytest

from sky_monarch.errors import BudgetSpentError
from sky_monarch.sdk import HostStatus, RunStatus

HOST = {
    "host": "demo-h0",
    "groups": [0, 1],
    "spare": False,
    "head": False,
    "attempt": 2,
    "phase": "UP",
    "reason": None,
    "gone": False,
    "since_ms": 5,
    "stops_in_s": 21.5,
    "place": "RunPod/CA-MTL-1",
    "choice": 0,
    "usd_per_hour": 16.0,
    "cost_usd": 3.5,
    "wasted_usd": 0.5,
}


def test_a_status_with_hosts_is_read_and_written_again_as_it_was() -> None:
    status = RunStatus.from_json({"run_id": "r", "hosts": [HOST], "cost_usd": 3.5, "wasted_usd": 0.5})
    assert status.hosts == (HostStatus(**{**HOST, "groups": (0, 1)}),)
    written = status.to_json()
    assert written["hosts"] == [HOST]
    assert RunStatus.from_json(written) == status


def test_a_status_of_an_older_version_has_no_hosts_and_no_cost() -> None:
    status = RunStatus.from_json({"run_id": "r", "state": "RUNNING"})
    assert (status.hosts, status.cost_usd, status.wasted_usd) == ((), None, None)


def test_a_spent_budget_has_an_error_of_its_own() -> None:
    status = RunStatus(run_id="r", state="FAILED", exit_code=9, reason="the budget is spent")
    with pytest.raises(BudgetSpentError, match="the budget is spent"):
        status.check()
    assert BudgetSpentError.exit_code == 9
