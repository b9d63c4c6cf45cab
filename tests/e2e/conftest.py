"""Fixtures of the tests on a real cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.client import Client
from tests.e2e.site import Site, site
from tests.e2e.slurm import NotHereError, check_this_machine


def pytest_report_header() -> str:
    """What is not real about it."""
    return "e2e: Slurm, sshd and SkyPilot are real; GPUs are SIMULATED (GRES on clones of /dev/null)"


@pytest.fixture(scope="session", name="site")
def a_site() -> Iterator[Site]:
    """One cluster for all tests: four nodes and an API server."""
    try:
        check_this_machine()
    except NotHereError as error:
        pytest.fail(str(error), pytrace=False)  # never skipped: a stage that ran nothing would be green
    with site() as made:
        yield made


@pytest.fixture(scope="session")
def client(site: Site) -> Client:
    """The cluster's user."""
    return Client(site)


@pytest.fixture(scope="module", autouse=True)
def _nodes_for_the_next(client: Client) -> Iterator[None]:
    """What a failed test leaves behind holds no nodes that the next file needs."""
    yield
    for name in list(client.names):
        client.cli("down", name, "--grace", "1", timeout_s=240)
