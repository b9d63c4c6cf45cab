"""Every job file that a guide shows, whole or in part, is one: it is valid, and `up` would take it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from sky_monarch.config import JobSpec, check_job
from sky_monarch.launch.review import review

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: What a part of a job file leaves to the reader.
BASE = {"name": "shown", "replicas": 2, "run": "python train.py"}
FIELDS = frozenset(JobSpec.model_fields)


def snippets() -> list[tuple[str, str]]:
    """``(where, text)`` of each block of YAML whose fields are those of a job."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"^( *)```ya?ml\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start()) + 2
            body = re.sub(rf"^{block[1]}", "", block[2], flags=re.MULTILINE)
            if is_job(body):
                found.append((f"{page.relative_to(ROOT)}:{line}", body))
    return found


def is_job(text: str) -> bool:
    values = YAML(typ="safe", pure=True).load(text)
    return isinstance(values, dict) and bool(values) and FIELDS.issuperset(values)


SNIPPETS = snippets()


def test_the_pages_have_job_files() -> None:
    assert {where.partition(":")[0] for where, _ in SNIPPETS} >= {"README.md", "docs/guides/spot.md"}


@pytest.mark.parametrize("text", [text for _, text in SNIPPETS], ids=[where for where, _ in SNIPPETS])
def test_what_a_page_shows_is_planned_without_a_client_of_any_store(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sky_monarch.config.checkpoint_target.find_spec", lambda _: None)
    given = YAML(typ="safe", pure=True).load(text)
    file = tmp_path / "job.yaml"
    missing = "".join(f"{key}: {value}\n" for key, value in BASE.items() if key not in given)
    file.write_text(f"{text}\n{missing}")

    typed = {key: "x" for key, value in (given.get("secrets") or {}).items() if value is None}

    checked = check_job(file, secret_overrides=typed)

    assert checked.job is not None, [problem.placed("") for problem in checked.problems]
    found = review(checked.job)
    assert (found.refusals, found.left_out, found.plan.refused) == ((), (), ())
