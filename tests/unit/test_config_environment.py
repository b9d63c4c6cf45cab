"""``envs``, ``secrets``, ``--env`` and ``--secret``."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sky_monarch.config import JobFileError, check_job, load_job, parse_override, parse_overrides
from sky_monarch.config.environment import RESERVED

VALID = "name: demo\nreplicas: 2\nrun: python train.py\n"
INTERNALS = Path(__file__).parents[2] / "docs/reference/internals.md"


def only_problem(text: str, **options):
    problems = check_job(text, **options).problems
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


@pytest.mark.parametrize(
    "text",
    [
        "010",
        "yes",
        "no",
        "on",
        "off",
        "y",
        "1.10",
        "12:30:45",
        "2026-01-02",
        "2026-01-02T03:04:05Z",
        "0x10",
        "0o17",
        "1_000",
        "1e3",
        ".5",
        "+1",
        "-0",
        ".inf",
        ".nan",
        "true",
        "True",
        "FALSE",
        "0b11",
        "1.",
        "00",
        "=",
        "a=b=c",
        "a#b",
    ],
)
def test_a_scalar_keeps_the_text_that_was_typed(text):
    job = load_job(f"{VALID}envs: {{A: {text}}}\nsecrets:\n  B: {text}\n")

    assert job.envs == {"A": text}
    assert job.secrets == {"B": text}


def test_names_keep_their_text_too():
    assert load_job(VALID + "envs: {NO: a, y: b, TRUE: c}\n").envs == {"NO": "a", "y": "b", "TRUE": "c"}


def test_quotes_blocks_escapes_and_aliases_give_what_yaml_says():
    lines = [
        "envs:",
        '  A: "x\\ty"',
        "  B: 'it''s'",
        "  C: |\n    one\n    two",
        "  D: >-\n    a\n    b",
        '  E: ""',
        "  F: &f 010",
        "  G: *f",
    ]
    text = VALID + "\n".join(lines) + "\n"

    expected = {"A": "x\ty", "B": "it's", "C": "one\ntwo\n", "D": "a b", "E": "", "F": "010", "G": "010"}
    assert load_job(text).envs == expected


@pytest.mark.parametrize("null", ["", "~", "null", "Null", "NULL"])
@pytest.mark.parametrize(("section", "option"), [("envs", "--env"), ("secrets", "--secret")])
def test_a_variable_without_a_value_is_refused_with_the_option_that_gives_one(section, option, null):
    problem = only_problem(f"{VALID}{section}: {{TOK: {null}}}\n")

    assert (problem.path, problem.line) == (f"{section}.TOK", 4)
    assert "TOK" in problem.message
    assert f"{option} TOK" in (problem.fix or "")


def test_a_variable_without_a_value_is_filled_from_the_callers_environment():
    job = load_job(
        VALID + "envs: {HF_TOKEN: }\n", env_overrides={"HF_TOKEN": None}, environ={"HF_TOKEN": "hf"}
    )

    assert job.envs == {"HF_TOKEN": "hf"}


def test_the_callers_environment_is_this_process_by_default(monkeypatch):
    monkeypatch.setenv("CONFIG_TEST_TOKEN", "here")

    assert load_job(VALID, secret_overrides={"CONFIG_TEST_TOKEN": None}).secrets == {
        "CONFIG_TEST_TOKEN": "here"
    }


def test_a_name_that_the_callers_environment_lacks_is_an_error_without_a_line():
    problem = only_problem(VALID, env_overrides={"NOPE": None}, environ={})

    assert (problem.path, problem.line) == ("envs.NOPE", None)
    assert "--env NOPE" in problem.message


@pytest.mark.parametrize(
    ("text", "env", "secret"),
    [
        ("envs: {TOK: a}\nsecrets: {TOK: b}\n", {}, {}),
        ("envs: {TOK: }\nsecrets: {TOK: b}\n", {"TOK": "x"}, {}),
        ("envs: {TOK: a}\n", {}, {"TOK": "b"}),
        ("", {"TOK": "a"}, {"TOK": "b"}),
    ],
)
def test_a_name_in_envs_and_in_secrets_is_refused(text, env, secret):
    problem = only_problem(VALID + text, env_overrides=env, secret_overrides=secret)

    assert (problem.path, problem.message) == ("secrets.TOK", "TOK is in envs and in secrets")


def test_an_option_replaces_or_adds():
    overrides = parse_overrides(["A=1", "B=x=y=z", "C=", "A=2"])

    assert overrides == {"A": "2", "B": "x=y=z", "C": ""}
    assert load_job(VALID + "envs: {A: old, D: kept}\n", env_overrides=overrides).envs == {
        **overrides,
        "D": "kept",
    }
    assert parse_override("KEY") == ("KEY", None)


@pytest.mark.parametrize("name", ["1A", "A-B", "A B", "", "é", "A.B", "A\n", "٣", "=", "A\0"])
def test_a_name_that_no_shell_can_read_is_refused(name):
    problem = only_problem(VALID, env_overrides={name: "x"})

    assert "is no name of an environment variable" in problem.message
    text = f"{VALID}envs: {{{json.dumps(name)}: x}}\n"
    assert only_problem(text).line == 4


@pytest.mark.parametrize("name", [*RESERVED, "SKY_MONARCH_TOKEN", "SKY_MONARCH_X"])
def test_a_name_that_the_agent_sets_is_refused_with_the_reason(name):
    for section in ("envs", "secrets"):
        assert "is reserved: " in only_problem(f"{VALID}{section}: {{{name}: x}}\n").message
    assert "is reserved: " in only_problem(VALID, secret_overrides={name: "x"}).message


def test_every_variable_that_internals_promises_to_a_rank_is_reserved():
    section = INTERNALS.read_text().split("## What a rank gets")[1].split("Also `PYTHONUNBUFFERED")[0]
    words = " ".join(re.findall(r"`([^`]*)`", section)).split()
    promised = {word.partition("=")[0] for word in words if re.fullmatch(r"[A-Z][A-Z_]+(=\w+)?", word)}
    promised -= {"OMP_NUM_THREADS", "TORCHFT_QUORUM_RETRIES"}  # defaults, which a job may replace

    assert len(promised) > 25
    assert {
        name for name in promised if name not in RESERVED and not name.startswith("SKY_MONARCH_")
    } == set()


def test_values_of_any_text_reach_the_spec_unchanged():
    value = "a$b\"c`d'\n=é\t\r\\ 🎉 \u2028"

    assert load_job(VALID, env_overrides={"V": value}).envs["V"] == value
    assert load_job(f"{VALID}envs: {{V: {json.dumps(value)}}}\n").envs["V"] == value


@settings(deadline=None, max_examples=300)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60))
def test_every_text_without_nul_survives_yaml_options_and_the_run_folder(value):
    job = load_job(f"{VALID}envs: {{V: {json.dumps(value)}}}\n", secret_overrides={"W": value})

    assert job.secrets["W"] == value
    assert job.envs["V"] == value
    assert job.from_public(job.public_dict(), json.loads(json.dumps(job.private_values()))) == job


def test_a_value_arrives_byte_equal_in_a_real_process():
    value = "a$b\"c`d'\n=é\x7f\x01"
    job = load_job(VALID, env_overrides={"V": value})

    out = subprocess.run(["/usr/bin/env", "-0"], env=job.envs, capture_output=True, check=True).stdout
    assert out == b"V=" + os.fsencode(value) + b"\0"


@pytest.mark.parametrize("value", ["a\0b", "\udcff", "x" * (128 * 1024)])
def test_a_value_that_no_process_can_take_is_refused_without_being_shown(value):
    problem = only_problem(VALID, secret_overrides={"V": value})

    assert problem.path == "secrets.V"
    assert value not in str(problem)


def test_the_longest_value_that_linux_takes_is_accepted_and_really_starts_a_process():
    value = "x" * (128 * 1024 - len("V=") - 1)
    job = load_job(VALID, env_overrides={"V": value})

    assert subprocess.run(["/bin/true"], env=job.envs, check=False).returncode == 0
    with pytest.raises(OSError, match="too long"):
        subprocess.run(["/bin/true"], env={"V": value + "x"}, check=False)


def test_variables_that_are_too_large_together_are_refused():
    overrides = {f"V{index}": "x" * 100_000 for index in range(12)}

    assert only_problem(VALID, env_overrides=overrides).path == "envs"


@pytest.mark.parametrize("value", ["[A=1]", "text", "{A: [1]}", "{A: {B: 1}}"])
def test_sections_of_another_shape_are_refused(value):
    assert only_problem(f"{VALID}envs: {value}\n").path.startswith("envs")


def test_no_error_and_no_dump_holds_a_secret():
    job = load_job(VALID + "envs: {E: canary-e}\nsecrets: {S: canary-s}\n")
    assert "canary" not in repr(job) + str(job) + json.dumps(job.public_dict()) + job.model_dump_json()

    with pytest.raises(JobFileError) as caught:
        load_job("name: A\nsecrets: {S: canary-s, 'b d': canary-t, RANK: canary-u}\nenvs: {S: canary-v}\n")
    assert "canary" not in str(caught.value) + repr(caught.value.problems)
