"""What ``load_job`` says about a job file, and that it says all of it at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sky_monarch.config import Checked, JobFileError, check_job, load_job, problems_as_json
from sky_monarch.errors import ConfigError, SkyMonarchError

VALID = "name: demo\nreplicas: 3\nrun: python train.py\n"


def problems_of(text: str) -> dict[str, object]:
    return {problem.path: problem for problem in check_job(text).problems}


def only_problem(text: str):
    problems = check_job(text).problems
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


def test_a_minimal_job_gets_every_default():
    job = load_job(VALID)

    assert (job.name, job.replicas, job.min_replicas, job.ranks_per_replica) == ("demo", 3, 1, 1)
    assert (job.infra, job.workdir, job.setup, job.setup_timeout_s) == ("local", str(Path.cwd()), "", 1800)
    assert (job.preload, job.envs, job.secrets, job.checkpoint) == ((), {}, {}, None)
    recovery = job.recovery
    assert (recovery.max_restarts, recovery.window_s, recovery.backoff_s, recovery.backoff_max_s) == (
        8,
        600,
        1,
        60,
    )
    assert (recovery.startup_limit_s, recovery.progress_limit_s) == (1800, "auto")
    assert (recovery.grace_s, recovery.standby) == (10, 1)
    house = job.lighthouse
    assert (house.kind, house.join_timeout_s, house.heartbeat_timeout_s) == ("sky-monarch", 30, 2)
    assert (house.quorum_timeout_s, house.process_group_timeout_s) == (600, 30)
    assert (job.logs.segment_mib, job.logs.segments) == (16, 8)


def test_every_typo_is_named_at_once_with_line_and_suggestion():
    text = "num_workers: 2\nresources: {acelerators: MI300X:8}\nname: a\nrun: x\n"

    with pytest.raises(JobFileError) as caught:
        load_job(text)

    assert isinstance(caught.value, ConfigError)
    assert caught.value.exit_code == 2
    found = [(p["path"], p["line"], p["suggestion"]) for p in problems_as_json(caught.value.problems)]
    assert found == [("num_workers", 1, "replicas"), ("resources.acelerators", 2, "accelerators")]


def test_the_json_form_of_a_problem_has_exactly_the_documented_keys():
    listed = problems_as_json(check_job("name: A\n").problems)

    assert json.loads(json.dumps(listed)) == listed
    keys = {"path", "line", "column", "message", "suggestion", "fix", "severity"}
    assert all(set(problem) == keys for problem in listed)


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("num_nodes: 2", "replicas"),
        ("numNodes: 2", "replicas"),
        ("replica: 2", "replicas"),
        ("nproc_per_node: 2", "ranks_per_replica"),
        ("nproc-per-node: 2", "ranks_per_replica"),
        ("env: {A: b}", "envs"),
        ("environment: {A: b}", "envs"),
        ("secret: {A: b}", "secrets"),
        ("command: x", "run"),
        ("accelerators: MI300X", "resources.accelerators"),
        ("use_spot: true", "resources.use_spot"),
        ("max_restarts: 3", "recovery.max_restarts"),
        ("every_steps: 3", "checkpoint.every_steps"),
        ("working_dir: .", "workdir"),
        ("Setup: x", "setup"),
        ("setup_timeout: 3", "setup_timeout_s"),
        ("recovery: {grace: 3}", "grace_s"),
        ("recovery: {max_retries: 3}", "max_restarts"),
        ("recovery: {preload: []}", "preload"),
        ("resources: {infra: local}", "infra"),
        ("resources: {gpus: MI300X}", "accelerators"),
        ("resources: {memory: 3}", "memory_gib"),
        ("resources: {any_of: [{spot: true}]}", "use_spot"),
        ("lighthouse: {quorum_timeout: 70}", "quorum_timeout_s"),
        ("logs: {segmnts: 3}", "segments"),
        ("checkpoint: {to: x, every_steps: 1, kep: 2}", "keep"),
    ],
)
def test_a_key_of_another_tool_or_with_a_typo_is_answered_with_ours(line, suggestion):
    problem = only_problem(VALID + line + "\n")

    assert problem.message == "unknown field"
    assert problem.suggestion == suggestion
    assert problem.line == 4


def test_a_key_that_resembles_nothing_is_answered_with_the_known_ones():
    problem = only_problem(VALID + "zzz: 1\n")

    assert problem.suggestion is None
    assert "replicas" in (problem.fix or "")


def test_a_misspelt_required_field_is_not_also_reported_as_missing():
    assert only_problem("name: a\nreplicas: 1\ncommand: x\n").path == "command"


@pytest.mark.parametrize("field", ["name", "replicas", "run"])
def test_a_missing_required_field_comes_with_the_line_to_add(field):
    text = "".join(line + "\n" for line in VALID.splitlines() if not line.startswith(field))

    problem = only_problem(text)

    assert (problem.path, problem.message) == (field, "is missing")
    assert f"{field}: " in (problem.fix or "")


@pytest.mark.parametrize(
    "field",
    [
        "name",
        "replicas",
        "min_replicas",
        "infra",
        "resources",
        "workdir",
        "setup",
        "setup_timeout_s",
        "run",
        "preload",
        "envs",
        "secrets",
        "recovery",
        "checkpoint",
        "lighthouse",
        "logs",
    ],
)
def test_a_field_left_empty_is_refused_and_said_to_be_empty(field):
    lines = [line for line in VALID.splitlines() if not line.startswith(f"{field}:")]

    problem = only_problem("\n".join([*lines, f"{field}:"]) + "\n")

    assert (problem.path, problem.message, problem.line) == (field, "is empty", len(lines) + 1)
    assert problem.fix


@pytest.mark.parametrize("section", ["resources", "recovery", "lighthouse", "logs", "checkpoint"])
def test_a_nested_field_left_empty_is_refused(section):
    names = {
        "resources": "cpus",
        "recovery": "grace_s",
        "lighthouse": "kind",
        "logs": "segments",
        "checkpoint": "to",
    }
    name = names[section]
    extra = ", every_steps: 3" if section == "checkpoint" else ""

    problem = only_problem(f"{VALID}{section}: {{{name}: {extra}}}\n")

    assert (problem.path, problem.message) == (f"{section}.{name}", "is empty")


@pytest.mark.parametrize("empty", ["", "''", "[]", "{}"])
def test_empty_accelerators_are_refused_and_the_way_to_ask_for_none_is_said(empty):
    problem = only_problem(f"{VALID}resources: {{accelerators: {empty}, cpus: 16+}}\n")

    assert (problem.path, problem.message, problem.line) == ("resources.accelerators", "is empty", 4)
    assert "accelerators: null" in (problem.fix or "")


def test_null_accelerators_ask_for_none():
    assert load_job(VALID + "resources: {accelerators: null}\n").resources.accelerators is None
    assert load_job(VALID + "checkpoint: null\n").checkpoint is None


@pytest.mark.parametrize("field", ["replicas", "min_replicas", "ranks_per_replica"])
@pytest.mark.parametrize(
    "value",
    [
        "0",
        "-1",
        "2.0",
        "'2'",
        "true",
        "2e0",
        "010",
        "1_000",
        "[2]",
        "{a: 2}",
        ".inf",
        "9999999999",
        "9" * 5000,
    ],
)
def test_a_count_that_is_no_positive_whole_number_is_refused_with_its_line(field, value):
    lines = [line for line in VALID.splitlines() if not line.startswith(f"{field}:")]

    problem = only_problem("\n".join([f"{field}: {value}", *lines]) + "\n")

    assert (problem.path, problem.line) == (field, 1)
    assert problem.message.startswith("must be ")


def test_a_count_in_another_notation_is_answered_with_the_right_one():
    assert only_problem("replicas: '2'\nname: a\nrun: x\n").fix == "write 2, without quotes"
    assert only_problem("replicas: 2.0\nname: a\nrun: x\n").fix == "write 2"


def test_more_min_replicas_than_replicas_names_both_fields():
    problem = only_problem(VALID + "min_replicas: 4\n")

    assert problem.path == "min_replicas"
    assert problem.line == 4
    assert "min_replicas (4)" in problem.message
    assert "replicas (3)" in problem.message


def test_checks_between_fields_run_although_other_fields_are_wrong():
    found = problems_of(
        "name: A b\nreplicas: 3\nmin_replicas: 4\nrun: x\nrecovery: {backoff_s: 9, backoff_max_s: 3}\n"
    )

    assert set(found) == {"name", "min_replicas", "recovery.backoff_max_s"}


def test_a_check_between_fields_is_skipped_where_one_of_them_is_wrong():
    assert set(problems_of("name: a\nreplicas: 0\nmin_replicas: 4\nrun: x\n")) == {"replicas"}


def test_problems_come_in_the_order_of_their_lines():
    lines = [
        problem.line for problem in check_job("zz: 1\nrun:\nlogs: {a: 1}\nname: A\nreplicas: x\n").problems
    ]

    assert lines == sorted(lines)
    assert len(lines) == 5


def test_a_warning_alone_is_no_error():
    checked = check_job(VALID + "resources: {accelerators: {MI300X, MI325X}}\n")

    assert isinstance(checked, Checked)
    assert checked.job is not None
    assert [problem.severity for problem in checked.problems] == ["warning"]


def test_the_message_of_the_error_holds_file_line_and_fix(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("name: a\nreplicas: 1\nrun: x\nlogs: {segments: 0}\n")

    with pytest.raises(SkyMonarchError) as caught:
        load_job(file)

    assert str(caught.value) == f"{file}: line 4: logs.segments: must be at least 1, not 0"
