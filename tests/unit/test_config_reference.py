"""What is generated from the models, and what must agree with them: page, schema, template, quickstart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import sky_monarch.config
from sky_monarch.config import INIT_TEMPLATE, JobSpec, check_job, job_schema, load_job, loading, rank_command
from sky_monarch.config.fields import Part
from sky_monarch.config.reference import reference_page

ROOT = Path(__file__).parents[2]


def all_fields() -> dict[str, object]:
    """Every field by path, with its default."""
    found: dict[str, object] = {}
    for section, model in loading._SECTIONS.items():
        for name, field in model.model_fields.items():
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            if not isinstance(default, Part) and not (section == "" and name == "checkpoint"):
                found[f"{section}.{name}".strip(".")] = default
    return found


def test_the_committed_reference_page_is_current():
    committed = (ROOT / "docs/reference/job-file.md").read_text()

    assert committed == reference_page(), (
        "run: python -m sky_monarch.config.reference > docs/reference/job-file.md"
    )


def test_every_field_is_described():
    for model in loading._SECTIONS.values():
        assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_the_template_is_a_valid_job(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(INIT_TEMPLATE)

    assert check_job(file).problems == ()
    assert max(map(len, INIT_TEMPLATE.splitlines())) <= 120


def test_the_template_with_all_its_comments_removed_shows_every_field_with_its_default():
    # A line `# key: value` shows a field; `# checkpoint: null` opens a section, so its value is dropped.
    lines = [re.sub(r"^# ?(?=[a-z ]*[a-z_]+:( |$))", "", line) for line in INIT_TEMPLATE.splitlines()]
    text = (
        "\n".join(
            line.replace("checkpoint: null", "checkpoint:") for line in lines if not line.startswith("#")
        )
        + "\n"
    )

    shown = YAML(typ="safe", pure=True).load(text)

    flat = {}
    for key, value in shown.items():
        if key in ("resources", "recovery", "checkpoint", "lighthouse", "logs"):
            flat.update({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            flat[key] = value
    defaults = all_fields()
    assert set(flat) == set(defaults)
    examples = {"name", "replicas", "run", "checkpoint.to", "checkpoint.every_steps"}
    wrong = {
        path: (flat[path], default)
        for path, default in defaults.items()
        if path not in examples and flat[path] != (list(default) if isinstance(default, tuple) else default)
    }
    assert wrong == {}


def test_the_quickstart_is_valid_and_its_standbys_can_be_warm():
    checked = check_job(ROOT / "task_templates/quickstart.yaml")

    assert checked.problems == ()
    assert checked.job is not None
    assert checked.job.replicas == 4
    assert rank_command(checked.job.run)["kind"] == "exec"


def test_the_schema_describes_every_field_and_accepts_what_the_reader_accepts():
    schema = job_schema()

    assert set(schema["properties"]) == set(JobSpec.model_fields)
    assert schema["required"] == ["name", "replicas", "run"]
    assert schema["additionalProperties"] is False
    assert all("description" in part for part in schema["properties"].values())
    assert schema["properties"]["lighthouse"]["anyOf"][0] == {"enum": ["sky-monarch", "torchft"]}


def test_the_fields_that_keep_their_text_are_exactly_the_texts_of_the_models():
    texts = {"lighthouse"}
    for section, model in loading._SECTIONS.items():
        for name, field in model.model_fields.items():
            if field.annotation is str or name == "kind":
                texts.add(f"{section}.{name}".strip("."))
    assert texts == loading._TEXTS


def test_every_public_name_exists_and_the_list_is_complete():
    assert set(sky_monarch.config.__all__) == set(sky_monarch.config._HOME)
    assert sky_monarch.config.__all__ == sorted(
        sky_monarch.config.__all__, key=lambda n: (not n.isupper(), n[0].islower(), n)
    )
    for name in sky_monarch.config.__all__:
        assert getattr(sky_monarch.config, name) is not None
        assert name in dir(sky_monarch.config)
    with pytest.raises(AttributeError):
        _ = sky_monarch.config.nothing


def test_every_file_of_the_package_is_short():
    for file in [
        *Path(sky_monarch.config.__file__).parent.glob("*.py"),
        *Path(__file__).parent.glob("test_config_*.py"),
    ]:
        assert len(file.read_text().splitlines()) <= 400, file


def test_the_default_of_a_job_is_what_the_page_says():
    assert load_job("name: a\nreplicas: 1\nrun: x\n").recovery.max_restarts == 8
    assert "| `max_restarts` | whole number >= 0 | `8` |" in reference_page()
