"""YAML that two generations of readers read alike."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from sky_monarch.launch.yaml_text import yaml_text


def read(text: str, version: tuple[int, int]):
    reader = YAML(typ="safe", pure=True)
    reader.version = version
    return reader.load(text)


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffe\uffff"), max_size=20)
lines = st.lists(st.from_regex(r"[!-~]([ -~]{0,10}[!-~])?", fullmatch=True), min_size=1, max_size=4)
scripts = lines.map(lambda found: "\n".join(found) + "\n")
scalars = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | texts | scripts
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner.filter(lambda item: not isinstance(item, list)), max_size=3)
        | st.dictionaries(texts, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None)
@given(value=st.dictionaries(texts, values, min_size=1, max_size=3))
def test_what_is_written_is_read_back_by_both_generations(value):
    text = yaml_text(value)

    assert read(text, (1, 1)) == read(text, (1, 2)) == value


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "Yes",
        "010",
        "1:30",
        "1e3",
        "0x1f",
        "~",
        "null",
        ".inf",
        "2026-11-30",
        "",
        " a",
        "a: b",
        "- a",
        "*a",
    ],
)
def test_a_text_that_reads_as_something_else_is_quoted(text):
    written = yaml_text({"k": text})

    assert '"' in written
    assert read(written, (1, 1)) == read(written, (1, 2)) == {"k": text}


def test_what_people_read_is_not_quoted():
    value = {"name": "a-h0", "resources": {"infra": "k8s/ctx", "accelerators": "MI300X:8", "cpus": "16+"}}

    assert yaml_text({**value, "run": "set -e\n  go\n"}) == (
        'name: a-h0\nresources:\n  infra: k8s/ctx\n  accelerators: MI300X:8\n  cpus: "16+"\n'
        "run: |\n  set -e\n    go\n"
    )
