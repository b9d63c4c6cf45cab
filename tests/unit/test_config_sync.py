"""``sync``: what a job file may say, and what a rank is told."""

from __future__ import annotations

import pytest

from sky_monarch.config import JobSpec, check_job, load_job
from sky_monarch.config.problem import FieldRefusalError
from sky_monarch.config.sync import MOST_LOCAL_STEPS, local_steps, read_sync
from sky_monarch.errors import ConfigError
from sky_monarch.training.environment import RankEnvironment

VALID = "name: demo\nreplicas: 3\nrun: python train.py\n"


def test_groups_average_in_every_step_unless_a_job_says_otherwise():
    assert load_job(VALID).sync == "every_step"
    assert load_job(VALID + "sync: every_step\n").sync == "every_step"
    assert load_job(VALID + "sync: diloco(20)\n").sync == "diloco(20)"
    assert load_job(VALID + f"sync: 'diloco({MOST_LOCAL_STEPS})'\n").sync == f"diloco({MOST_LOCAL_STEPS})"


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("diloco", "diloco(20)"),
        ("DiLoCo(500)", "diloco(500)"),
        ("diloco 8", "diloco(8)"),
        ("diloco=08", "diloco(8)"),
        ("dilocco(20)", "diloco(20)"),
        ("{diloco: 30}", "diloco(30)"),
        ("local-sgd(4)", "diloco(4)"),
        ("every-step", "every_step"),
        ("Every step", "every_step"),
        ("every_steps", "every_step"),
        ("ddp", "every_step"),
    ],
)
def test_what_was_probably_meant_is_said_with_its_line(value, meant):
    (problem,) = check_job(f"{VALID}sync: {value}\n").problems
    assert (problem.path, problem.line, problem.suggestion) == ("sync", 4, meant)
    assert load_job(f"{VALID}sync: {meant}\n").sync == meant


@pytest.mark.parametrize("value", ["5", "true", "[diloco]", "weekly", "'diloco(-1)'", "{a: 1, b: 2}", "'()'"])
def test_what_is_neither_is_refused(value):
    (problem,) = check_job(f"{VALID}sync: {value}\n").problems
    assert (problem.path, problem.line) == ("sync", 4)
    assert problem.message.startswith("must be every_step or diloco(n), such as diloco(20)")


@pytest.mark.parametrize("steps", [0, MOST_LOCAL_STEPS + 1])
def test_a_number_of_steps_out_of_range_is_refused_with_the_range(steps):
    (problem,) = check_job(f"{VALID}sync: diloco({steps})\n").problems
    assert problem.message == f"diloco takes 1 to {MOST_LOCAL_STEPS} steps, not {steps}"


def test_a_job_of_python_and_one_of_an_older_run_folder_hold_to_the_same():
    with pytest.raises(ConfigError, match="every_step or diloco"):
        JobSpec(name="a", replicas=1, run="x", sync="never")
    public = JobSpec(name="a", replicas=1, run="x", sync="diloco(3)").public_dict()
    assert JobSpec.from_public(public, {}).sync == "diloco(3)"
    del public["sync"]
    assert JobSpec.from_public(public, {}).sync == "every_step"


def test_fields_of_other_tools_are_known():
    for name in ("semi_sync_method", "sync_every", "diloco"):
        assert check_job(f"{VALID}{name}: 20\n").problems[0].suggestion == "sync"


def test_a_rank_is_told_and_refuses_what_it_cannot_read():
    assert RankEnvironment.read({}).sync is None
    assert RankEnvironment.read({"SKY_MONARCH_SYNC": "diloco(7)"}).sync == "diloco(7)"
    with pytest.raises(ConfigError, match="SKY_MONARCH_SYNC must be every_step or diloco"):
        RankEnvironment.read({"SKY_MONARCH_SYNC": "often"})


def test_the_number_of_steps_alone():
    assert [local_steps(read_sync(text)) for text in ("every_step", "diloco(1)", "diloco(20)")] == [0, 1, 20]
    with pytest.raises(FieldRefusalError):
        read_sync(None)
