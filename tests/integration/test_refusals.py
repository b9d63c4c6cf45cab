"""What cannot be meant is refused by the real command, before anything exists; what can is taken as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.runs import Workbench

HEAD = "name: refused\nrun: 'true'\n"

# What the job file says below HEAD, and for each problem: its line, its path, words of message or fix.
CASES = {
    "typos": (
        "replicas: 2\nnum_workers: 2\nresources:\n  acelerators: MI300X:8\nrecovery: {max_restart: 3}\n",
        [
            (4, "num_workers", "did you mean 'replicas'"),
            (6, "resources.acelerators", "did you mean 'accelerators'"),
            (7, "recovery.max_restart", "did you mean 'max_restarts'"),
        ],
    ),
    "empty accelerators": (
        "replicas: 1\nresources: {accelerators: , cpus: 16+}\n",
        [(4, "resources.accelerators", "`accelerators: null`")],
    ),
    "empty fields": (
        "replicas: 1\nsetup:\nlogs: {segments: }\n",
        [(4, "setup", "empty"), (5, "logs.segments", "empty")],
    ),
    "no replicas": ("replicas: 0\n", [(3, "replicas", "at least 1, not 0")]),
    "negative": ("replicas: -1\n", [(3, "replicas", "at least 1, not -1")]),
    "fraction": ("replicas: 2.0\n", [(3, "replicas", "write 2")]),
    "quoted": ('replicas: "2"\n', [(3, "replicas", "without quotes")]),
    "min over replicas": (
        "replicas: 3\nmin_replicas: 4\n",
        [(4, "min_replicas", "min_replicas (4) must not be larger than replicas (3)")],
    ),
    "null values": (
        "replicas: 1\nenvs: {HF_TOKEN: }\nsecrets: {TOK: }\n",
        [(4, "envs.HF_TOKEN", "--env HF_TOKEN"), (5, "secrets.TOK", "--secret TOK")],
    ),
    "twice": (
        "replicas: 1\nenvs: {TOK: a}\nsecrets: {TOK: b}\n",
        [(5, "secrets.TOK", "TOK is in envs and in secrets")],
    ),
    "timeouts": (
        "replicas: 1\nlighthouse: {process_group_timeout_s: 700, join_timeout_s: 1}\n",
        [
            (4, "lighthouse.heartbeat_timeout_s", "heartbeat_timeout_s < join_timeout_s <= quorum_timeout_s"),
            (4, "lighthouse.process_group_timeout_s", "must be shorter than quorum_timeout_s (600)"),
        ],
    ),
    "name": ("replicas: 1\nname: a b/ü\n", [(4, "name", "twice")]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_job_that_cannot_be_meant_is_refused_before_anything_exists(
    workbench: Workbench, case: str
) -> None:
    text, problems = CASES[case]
    job = workbench.write(HEAD + text)
    done = workbench.cli("up", str(job), "--detach")
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    lines = " ".join(done.stderr.split())
    for line, path, words in problems:
        assert f"line {line}: {path}: " in lines
        assert words in lines
    assert not workbench.home.exists(), "nothing is made for a job that is refused"

    checked = workbench.cli("validate", str(job), "--json")
    assert checked.returncode == 2
    found = json.loads(checked.stdout)
    assert [(one["line"], one["path"]) for one in found] == [(line, path) for line, path, _ in problems]
    assert all({"path", "line", "suggestion"} <= one.keys() for one in found)


def test_a_bad_name_is_refused_with_a_usable_one(workbench: Workbench) -> None:
    job = workbench.write("name: a b/ü\nreplicas: 1\nrun: 'true'\n")
    done = workbench.cli("up", str(job))
    assert done.returncode == 2
    assert "line 1: name: " in done.stderr
    assert "a-b" in done.stderr
    assert not workbench.home.exists()


def test_a_variable_without_a_value_is_filled_from_the_callers_environment(workbench: Workbench) -> None:
    job = workbench.write("name: filled\nreplicas: 1\nrun: 'echo got $HF_TOKEN'\nenvs: {HF_TOKEN: }\n")
    workbench.env["HF_TOKEN"] = "from the shell"
    done = workbench.cli("up", str(job), "--env", "HF_TOKEN")
    assert done.returncode == 0, done.stderr
    assert "[0/0] got from the shell" in done.stdout


@pytest.mark.slow
def test_line_ends_byte_order_mark_and_comments_change_nothing_that_runs(workbench: Workbench) -> None:
    text = (
        "name: bytes\n# 🚀 a comment with ümlauts\nreplicas: 1\n"
        "envs: {FACE: 'smile 😀 é'}\nrun: |\n  printf '%s|' one \\\n    two\n  printf '%s\\n' \"$FACE\"\n"
    )
    forms = {
        "lf": text.encode(),
        "crlf": text.replace("\n", "\r\n").encode(),
        "bom": b"\xef\xbb\xbf" + text.encode(),
        "both": b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
    }
    plans, printed = set(), set()
    for form, data in forms.items():
        job = Path(workbench.folder / f"{form}.yaml")
        job.write_bytes(data)
        dry = workbench.cli("up", str(job), "--dry-run", "--json")
        assert dry.returncode == 0, dry.stderr
        assert "\\r" not in dry.stdout
        plans.add(dry.stdout)
        if form in ("lf", "both"):
            done = workbench.cli("up", str(job))
            assert done.returncode == 0, done.stderr
            printed.add(workbench.cli("logs", "bytes", "--replica", "0", "--rank", "0").stdout)
    assert len(plans) == 1
    assert printed == {"one|two|smile 😀 é\n"}
