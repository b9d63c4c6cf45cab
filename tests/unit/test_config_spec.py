"""A job from Python, into a run folder and back."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sky_monarch.config import (
    Checkpoint,
    JobFileError,
    JobSpec,
    Lighthouse,
    Recovery,
    Resources,
    check_job,
    load_job,
)
from sky_monarch.errors import ConfigError

FULL = """\
name: full
replicas: 4
min_replicas: 2
ranks_per_replica: 8
infra: slurm/a
resources: {accelerators: [MI300X:8, MI325X:8], cpus: 16+, memory_gib: 128, any_of: [{use_spot: true}, {cpus:
4}]}
setup: echo hi
setup_timeout_s: 60
run: python train.py
preload: [json, email.message]
envs: {A: 010, B: 'x'}
secrets: {S: canary}
recovery: {max_restarts: 3, window_s: 60, backoff_s: 0, startup_limit_s: off, progress_limit_s: 90, standby:
0}
checkpoint: {to: saved, every_steps: 10, keep: 1}
lighthouse: {kind: torchft, quorum_timeout_s: 90}
logs: {segment_mib: 1, segments: 2}
"""

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
variables = st.dictionaries(st.from_regex(r"[A-Z]{1,4}[0-9]", fullmatch=True), texts, max_size=4)


def test_a_full_job_survives_the_run_folder():
    job = load_job(FULL)

    public = json.loads(json.dumps(job.public_dict()))
    private = json.loads(json.dumps(job.private_values()))

    assert (public["envs"], public["secrets"]) == (["A", "B"], ["S"])
    assert private == {"envs": {"A": "010", "B": "x"}, "secrets": {"S": "canary"}}
    back = JobSpec.from_public(public, {"token": "t", "base_env": {}, **private})
    assert back == job
    assert back.digest() == job.digest()


def test_a_run_folder_whose_two_files_differ_is_refused():
    job = load_job(FULL)

    with pytest.raises(ConfigError, match="secrets"):
        JobSpec.from_public(job.public_dict(), {"envs": {"A": "010", "B": "x"}})
    with pytest.raises(ConfigError, match="replicas") as caught:
        JobSpec.from_public({**job.public_dict(), "replicas": "4"}, job.private_values())
    assert "canary" not in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(
    replicas=st.integers(1, 100),
    ranks=st.integers(1, 64),
    run=texts.filter(
        lambda text: text.strip() and not text.lstrip().startswith("#") and text.strip("\r\n \t")
    ),
    envs=variables,
    accelerators=st.none()
    | st.sampled_from(["MI300X:8", "mi325x", ["MI355X:8", "MI300X:8"], {"MI300X": 4, "MI325X": None}]),
    limit=st.just("off") | st.just("auto") | st.floats(0.001, 1e6),
    keep=st.integers(1, 9),
    kind=st.sampled_from(["sky-monarch", "torchft"]),
)
def test_any_job_survives_the_run_folder(replicas, ranks, run, envs, accelerators, limit, keep, kind):
    try:
        job = JobSpec(
            name="p",
            replicas=replicas,
            ranks_per_replica=ranks,
            run=run,
            envs=envs,
            resources=Resources(accelerators=accelerators),
            recovery=Recovery(progress_limit_s=limit),
            checkpoint=Checkpoint(to="x", every_steps=1, keep=keep),
            lighthouse=Lighthouse(kind=kind),
        )
    except JobFileError:  # comment lines only, in some white space or other
        assert all(
            not line.strip() or line.lstrip().startswith("#") for line in run.replace("\r", "\n").split("\n")
        )
        return
    public = json.loads(json.dumps(job.public_dict()))

    assert JobSpec.from_public(public, json.loads(json.dumps(job.private_values()))) == job
    assert "\r" not in job.run


def test_a_job_cannot_be_changed_or_given_an_unknown_field():
    job = load_job(FULL)

    with pytest.raises(ValidationError):
        job.replicas = 9  # type: ignore[misc]
    with pytest.raises(ValidationError):
        job.recovery.standby = 1  # type: ignore[misc]
    with pytest.raises(JobFileError, match="extra: unknown field"):
        JobSpec(name="a", replicas=1, run="x", extra=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "fields",
    [
        {"min_replicas": 2},
        {"replicas": 2.0},
        {"replicas": True},
        {"replicas": "1"},
        {"name": "A"},
        {"run": "  "},
        {"run": "a\0b"},
        {"envs": {"A": "x"}, "secrets": {"A": "canary"}},
        {"secrets": {"RANK": "canary"}},
        {"secrets": {"A": "canary\0"}},
        {"envs": {"A": 1}},
        {"envs": ["A"]},
        {"lighthouse": {"quorum_timeout_s": 20}},
        {"envs": {f"A{index}": "x" * 100_000 for index in range(12)}},
    ],
)
def test_a_job_made_in_python_obeys_the_same_rules_and_shows_no_secret(fields):
    with pytest.raises(JobFileError) as caught:
        JobSpec(**{"name": "a", "replicas": 1, "run": "x", **fields})
    assert caught.value.problems
    assert "canary" not in "".join(traceback.format_exception(caught.value))


def test_a_relative_workdir_of_a_job_made_in_python_starts_at_the_current_folder():
    job = JobSpec(name="a", replicas=1, run="x", workdir="sub/..")

    assert job.resolved_workdir() == Path.cwd()
    assert job.resolved_workdir(Path("/base")) == Path("/base")


def check_outcome(source: str | bytes) -> None:
    """Either a job that survives the run folder, or errors of one line each; anything else raises."""
    checked = check_job(source)
    errors = [problem for problem in checked.problems if problem.severity == "error"]
    assert all("\n" not in str(problem) for problem in checked.problems)
    if checked.job is None:
        assert errors
        with pytest.raises(JobFileError):
            load_job(source)
    else:
        assert not errors
        assert JobSpec.from_public(checked.job.public_dict(), checked.job.private_values()) == checked.job


yaml_pieces = st.sampled_from(
    [
        "name: a\n",
        "replicas: 2\n",
        "run: x\n",
        "envs:\n",
        "  A: b\n",
        "- ",
        "{",
        "}",
        "[",
        "]",
        ": ",
        "? ",
        "&a ",
        "*a",
        "<<: ",
        "!!str ",
        "|\n",
        ">-\n",
        "'",
        '"',
        "\n",
        "\t",
        "#",
        "resources:\n",
        "  accelerators: ",
        "MI300X:8\n",
        "any_of: ",
        "null",
        "~",
        "lighthouse: ",
        "checkpoint: ",
        "recovery: {",
        "---\n",
        "...\n",
        "%YAML 1.2\n",
        "\\x",
        "010",
        "é",
        "\u2028",
        "\0",
        "😀",
        "min_replicas: 9\n",
        "workdir: ",
        "preload: [",
        "a, ",
        "\ufeff",
        "\r\n",
        "secrets: {A: }\n",
        "1e999",
        ".nan",
        "-",
    ]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(yaml_pieces, max_size=25).map("".join) | st.text(max_size=80), st.booleans())
def test_no_text_makes_the_loader_raise_anything_but_its_own_error(text, as_bytes):
    source = text.encode("utf-8", "surrogatepass") if as_bytes else text + "\n"
    check_outcome(source)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100))
def test_no_bytes_make_the_loader_raise_anything_but_its_own_error(data):
    check_outcome(data)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from([*JobSpec.model_fields])
parts = st.sampled_from(
    [*Resources.model_fields, *Recovery.model_fields, *Lighthouse.model_fields, "to", "keep"]
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(fields, values | st.dictionaries(parts, values, max_size=3), max_size=8))
def test_no_value_in_any_field_makes_the_loader_raise_anything_but_its_own_error(job):
    checked = check_job(json.dumps(job) + "\n")

    assert (checked.job is None) == any(problem.severity == "error" for problem in checked.problems)
    assert all(problem.line is not None for problem in checked.problems)


def test_command_and_injection_parsing_and_the_package_itself_load_no_pydantic_and_no_yaml():
    code = (
        "import sys, sky_monarch.config.injection, sky_monarch.config.command as _, sky_monarch.config as c;"
        "c.parse_injection('kill:replica=0,step=1'); c.rank_command('x'); c.parse_overrides(['A=b']);"
        "c.problems_as_json([]); c.JobFileError; c.INIT_TEMPLATE;"
        "print([m for m in ('pydantic', 'ruamel', 'ruamel.yaml', 'typer') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert out.stdout == "[]\n"
