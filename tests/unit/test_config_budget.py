"""The budget of a job: read strictly, and no limit unless one is given."""

from __future__ import annotations

import pytest

from sky_monarch.config import JobSpec, check_job, load_job

VALID = "name: a\nreplicas: 1\nrun: x\n"


def test_without_a_budget_there_is_no_limit() -> None:
    budget = load_job(VALID).budget
    assert (budget.max_usd, budget.max_hours) == ("off", "off")


def test_a_budget_is_read_and_survives_its_run_folder() -> None:
    job = load_job(VALID + "budget: {max_usd: 50, max_hours: 1.5}\n")
    assert (job.budget.max_usd, job.budget.max_hours) == (50.0, 1.5)
    assert JobSpec.from_public(job.public_dict(), job.private_values()) == job
    assert job.digest() != load_job(VALID).digest()


def test_a_job_of_an_older_version_has_none() -> None:
    public = load_job(VALID).public_dict()
    del public["budget"]
    assert JobSpec.from_public(public, {"envs": {}, "secrets": {}}).budget.max_usd == "off"


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("{max_usd: 0}", "budget.max_usd", "more than 0"),
        ("{max_usd: -5}", "budget.max_usd", "more than 0"),
        ("{max_usd: .inf}", "budget.max_usd", "or less"),
        ("{max_usd: .nan}", "budget.max_usd", "or less"),
        ("{max_usd: true}", "budget.max_usd", "US dollars"),
        ("{max_usd: 50 usd}", "budget.max_usd", "write 50"),
        ("{max_usd: $50}", "budget.max_usd", "write 50"),
        ("{max_hours: 2 days}", "budget.max_hours", "write 48"),
        ("{max_hours: 12h}", "budget.max_hours", "write 12"),
        ("{max_hours: 1e9}", "budget.max_hours", "or less"),
        ("{max_hours: false}", "budget.max_hours", "off"),
        ("{max_cost: 5}", "budget.max_cost", "max_usd"),
        ("{hours: 5}", "budget.hours", "max_hours"),
        ("[5]", "budget", "mapping"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_was_probably_meant(
    text: str, path: str, words: str
) -> None:
    checked = check_job(f"{VALID}budget: {text}\n")
    assert checked.job is None
    (problem,) = checked.problems
    assert problem.path == path
    assert words in f"{problem.message} {problem.fix} {problem.suggestion}"
