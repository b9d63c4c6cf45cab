"""What the session makes of its environment, and the ladder of its timeouts. No torch."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sky_monarch.errors import ConfigError
from sky_monarch.training.environment import RankEnvironment
from sky_monarch.training.timeouts import Timeouts

FULL = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "4000",
    "REPLICA_GROUP_ID": "3",
    "NUM_REPLICA_GROUPS": "4",
    "TORCHFT_LIGHTHOUSE": "http://r3.g7.hush@127.0.0.1:5000",
    "SKY_MONARCH_AGENT": "unix:/run/agent.sock",
    "SKY_MONARCH_TOKEN": "hush",
    "SKY_MONARCH_RUN_ID": "demo",
    "SKY_MONARCH_REPLICA": "3",
    "SKY_MONARCH_RANK": "1",
    "SKY_MONARCH_GENERATION": "7",
    "SKY_MONARCH_REPLICAS": "4",
    "SKY_MONARCH_MIN_REPLICAS": "2",
    "SKY_MONARCH_LIGHTHOUSE_KIND": "sky-monarch",
}


def test_a_rank_of_a_run_knows_its_place() -> None:
    env = RankEnvironment.read(FULL)
    assert (env.replica, env.replicas, env.min_replicas) == (3, 4, 2)
    assert (env.rank, env.world_size, env.generation) == (1, 2, 7)
    assert env.replica_id == "rep_3.g7_3"
    assert env.store == ("127.0.0.1", 4000)
    assert env.lighthouse_kind == "sky-monarch"
    assert env.agent is not None
    assert "hush" not in repr(env.agent)


def test_a_program_that_is_started_alone_is_a_run_of_one() -> None:
    env = RankEnvironment.read({})
    assert (env.replica, env.replicas, env.rank, env.world_size) == (0, 1, 0, 1)
    assert (env.lighthouse, env.store, env.agent) == (None, None, None)


def test_replicas_of_a_raw_torchft_launcher_are_understood() -> None:
    env = RankEnvironment.read(
        {"REPLICA_GROUP_ID": "1", "NUM_REPLICA_GROUPS": "2", "TORCHFT_LIGHTHOUSE": "http://127.0.0.1:1"}
    )
    assert (env.replica, env.replicas, env.agent) == (1, 2, None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"TORCHFT_LIGHTHOUSE": ""}, "TORCHFT_LIGHTHOUSE is not set"),
        ({"RANK": "2", "SKY_MONARCH_RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
        ({"SKY_MONARCH_REPLICA": "4"}, "replica 4, but there are 4"),
        ({"SKY_MONARCH_GENERATION": "-1"}, "SKY_MONARCH_GENERATION is '-1'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"MASTER_PORT": None}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"SKY_MONARCH_TOKEN": None}, "SKY_MONARCH_TOKEN are not"),
    ],
)
def test_an_environment_that_cannot_be_is_refused_by_name(change: dict[str, str | None], named: str) -> None:
    env = {name: text for name, text in {**FULL, **change}.items() if text is not None}
    with pytest.raises(ConfigError, match=named) as caught:
        RankEnvironment.read(env)
    assert "hush" not in str(caught.value)


def job_timeouts(**change: float) -> dict[str, str]:
    job = {
        "join_timeout_s": 60.0,
        "heartbeat_timeout_s": 5.0,
        "quorum_timeout_s": 60.0,
        "process_group_timeout_s": 30.0,
    }
    return {"SKY_MONARCH_TIMEOUTS": json.dumps({**job, **change})}


def test_the_defaults_keep_the_order() -> None:
    Timeouts().validate()
    assert Timeouts.derive(env={}) == Timeouts()


def test_timeouts_follow_the_jobs_lighthouse() -> None:
    timeouts = Timeouts.derive(env=job_timeouts(process_group_timeout_s=20, quorum_timeout_s=90))
    assert (timeouts.collective_s, timeouts.quorum_s, timeouts.join_s) == (20, 90, 60)
    assert timeouts.transfer_s <= timeouts.collective_s
    assert 5 * timeouts.rendezvous_s < timeouts.transfer_s
    assert timeouts.quorum_s / (timeouts.quorum_retries + 1) <= 0.25, (
        "a lighthouse that is back is found soon"
    )


def test_torchfts_own_variables_win_as_they_do_in_torchft() -> None:
    env = {"TORCHFT_TIMEOUT_SEC": "100", "TORCHFT_QUORUM_TIMEOUT_SEC": "300", "TORCHFT_QUORUM_RETRIES": "9"}
    timeouts = Timeouts.derive(Timeouts(quorum_s=200), env)
    assert (timeouts.transfer_s, timeouts.quorum_s, timeouts.quorum_retries) == (100, 300, 9)


@pytest.mark.parametrize(
    ("env", "named"),
    [
        (
            job_timeouts(process_group_timeout_s=60),
            r"collective_s \(60 s\) must be less than quorum_s \(60 s\)",
        ),
        (job_timeouts(join_timeout_s=61), r"join_s \(61 s\) must be at most quorum_s \(60 s\)"),
        (job_timeouts(heartbeat_timeout_s=60), r"heartbeat_s \(60 s\) must be less than join_s"),
        ({"TORCHFT_TIMEOUT_SEC": "130"}, r"transfer_s \(130 s\) must be at most collective_s \(120 s\)"),
        ({"TORCHFT_QUORUM_TIMEOUT_SEC": "60"}, r"collective_s \(120 s\) must be less than quorum_s \(60 s\)"),
        ({"TORCHFT_QUORUM_RETRIES": "0"}, "would end every replica"),
        ({"TORCHFT_TIMEOUT_SEC": "1.5"}, "whole number"),
        ({"SKY_MONARCH_TIMEOUTS": "{}"}, "malformed"),
    ],
)
def test_timeouts_in_the_wrong_order_are_refused_with_the_right_one(env: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Timeouts.derive(env=env)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_timeout_that_is_no_duration_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="positive and finite"):
        replace(Timeouts(), rendezvous_s=value).validate()
