"""Accelerators in every spelling, and the candidates of ``any_of`` and ``ordered``."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from sky_monarch.config import Resources, check_job, load_job
from sky_monarch.gpus import GPUS, Accelerator, UnknownGpuError, canonical_gpu, parse_accelerator

VALID = "name: demo\nreplicas: 2\nranks_per_replica: 8\nrun: python train.py\n"


def job(resources: str):
    return load_job(f"{VALID}resources: {resources}\n")


def only_problem(resources: str):
    problems = check_job(f"{VALID}resources: {resources}\n").problems
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


SPELLINGS = [
    "MI300X:8",
    "mi300x:8",
    "Mi300X:8",
    "{MI300X: 8}",
    "{mi300x: 8}",
    '"MI300X : 8"',
    "[MI300X:8]",
    "[MI300X:8, mi300x:8]",
    "AMD Instinct MI300X:8",
    "'AMD Instinct™ MI300X OAM:8'",
    "amd-instinct-mi300x:8",
    "{AMD Instinct MI300X: 8}",
    "'  MI300X:8  '",
    "{MI300X:8}",
    '{"MI300X:8": null}',
    "'MI300X:8'",
    "\uff2d\uff29300X:8",
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_one_wish_gives_one_plan(spelling):
    first, second = job("{accelerators: MI300X:8}"), job(f"{{accelerators: {spelling}}}")

    assert first == second
    assert first.digest() == second.digest()
    assert second.public_dict()["resources"]["accelerators"] == "MI300X:8"
    assert [candidate.accelerator for candidate in second.resources.candidates()] == [
        Accelerator("MI300X", 8)
    ]


def test_a_name_without_a_count_means_one():
    assert job("{accelerators: MI325X}").public_dict()["resources"]["accelerators"] == "MI325X:1"


def test_the_set_form_is_two_candidates_of_one_with_a_notice_of_the_count():
    checked = check_job(f"{VALID}resources: {{accelerators: {{MI300X, MI325X}}}}\n")

    assert checked.job is not None
    wanted = [
        (candidate.accelerator.name, candidate.accelerator.count)
        for candidate in checked.job.resources.candidates()
    ]
    assert wanted == [("MI300X", 1), ("MI325X", 1)]
    assert [(problem.severity, problem.path) for problem in checked.problems] == [
        ("warning", "resources.accelerators")
    ]
    assert "1 x MI300X or 1 x MI325X" in checked.problems[0].message


def test_the_order_of_a_set_means_nothing_and_that_of_a_list_does():
    assert (
        job("{accelerators: {MI325X: 8, MI300X: 8}}").digest()
        == job("{accelerators: {MI300X: 8, MI325X: 8}}").digest()
    )
    first = job("{accelerators: [MI325X:8, MI300X:8]}")
    assert first.digest() != job("{accelerators: [MI300X:8, MI325X:8]}").digest()
    assert [str(candidate.accelerator) for candidate in first.resources.candidates()] == [
        "MI325X:8",
        "MI300X:8",
    ]
    assert first.resources.prefers_order
    assert not job("{accelerators: {MI325X: 8, MI300X: 8}}").resources.prefers_order


@pytest.mark.parametrize(
    ("value", "suggestion"),
    [
        ("MI30OX:8", "MI300X:8"),
        ("MI30X:8", "MI300X:8"),
        ("MI300:8", "MI300A:8"),
        ("MI355:4", "MI355X:4"),
        ("8xMI300X", "MI300X:8"),
        ("8x MI300X", "MI300X:8"),
        ("8 MI300X", "MI300X:8"),
        ("MI300X x8", "MI300X:8"),
        ("H100:8", None),
        ("MI300X:0", None),
        ("MI300X:-1", None),
        ("MI300X:2.5", None),
        ("'MI300X:'", None),
        ("MI300X:08", None),
        ("MI300X:8:1", None),
        ("8", None),
        ("true", None),
        ("MI300X:99999", None),
        ("{MI300X: 0}", None),
        ("{MI300X: 2.0}", None),
        ("{MI300X: '8'}", None),
        ("{MI300X: true}", None),
        ("[8]", None),
        ("[[MI300X]]", None),
        ("[{MI300X: 8}]", None),
        ("':'", None),
    ],
)
def test_accelerators_that_cannot_be_meant_are_refused(value, suggestion):
    problem = only_problem(f"{{accelerators: {value}}}")

    assert problem.path.startswith("resources.accelerators")
    assert problem.line == 5
    assert problem.suggestion == suggestion


def test_the_table_knows_its_models_by_their_own_names():
    for name, gpu in GPUS.items():
        assert canonical_gpu(f"amd instinct {name.lower()}") == name == gpu.name
        assert gpu.memory_gib > 0
        assert gpu.arch.startswith("gfx")
    with pytest.raises(UnknownGpuError, match="MI300X"):
        parse_accelerator("")


@pytest.mark.parametrize("kind", ["any_of", "ordered"])
def test_options_are_merged_into_the_base_and_keep_their_order(kind):
    resources = job(
        f"{{accelerators: MI300X:8, cpus: 16+, {kind}: [{{use_spot: true}}, {{use_spot: false, cpus: 8}}]}}"
    ).resources

    found = [(str(c.accelerator), c.cpus, c.use_spot) for c in resources.candidates()]
    assert found == [("MI300X:8", "16+", True), ("MI300X:8", "8", False)]
    assert resources.prefers_order == (kind == "ordered")


@pytest.mark.parametrize("kind", ["any_of", "ordered"])
@pytest.mark.parametrize("base", ["", "use_spot: true, ", "use_spot: false, "])
def test_what_an_option_says_of_spot_counts_whatever_the_base_says(kind, base):
    resources = job(f"{{{base}{kind}: [{{use_spot: false}}, {{use_spot: true}}, {{cpus: 4}}]}}").resources

    found = [candidate.use_spot for candidate in resources.candidates()]
    assert found == [False, True, "true" in base]


def test_an_option_may_ask_for_no_accelerator_although_the_base_does():
    resources = job("{accelerators: MI300X:8, any_of: [{accelerators: null}, {cpus: 4}]}").resources

    assert [candidate.accelerator for candidate in resources.candidates()] == [None, Accelerator("MI300X", 8)]


def test_equal_candidates_are_listed_once():
    assert len(job("{any_of: [{cpus: 4}, {cpus: '4'}, {cpus: 4.0}]}").resources.candidates()) == 1


def test_any_of_and_ordered_exclude_each_other():
    problem = only_problem("{any_of: [{cpus: 1}], ordered: [{cpus: 2}]}")

    assert problem.path == "resources.ordered"
    assert "any_of and ordered" in problem.message
    with pytest.raises(ValidationError):
        load_job(VALID).model_validate(
            {
                **load_job(VALID).public_dict(),
                "envs": {},
                "secrets": {},
                "resources": {"any_of": [{}], "ordered": [{}]},
            }
        )


@pytest.mark.parametrize(
    "value", ["[]", "{use_spot: true}", "[1]", "[{use_spot: 'False'}]", "[{any_of: []}]"]
)
def test_options_of_another_shape_are_refused(value):
    assert only_problem(f"{{any_of: {value}}}").path.startswith("resources.any_of")


def test_a_problem_inside_an_option_is_placed():
    problem = only_problem("\n  any_of:\n  - use_spot: true\n  - use_spot: yes")

    assert (problem.path, problem.line, problem.suggestion) == ("resources.any_of[1].use_spot", 8, "true")


@pytest.mark.parametrize(
    ("value", "canonical"),
    [("16", "16"), ("16+", "16+"), ("'16'", "16"), ("0.5", "0.5"), ("16.0", "16"), ("' 8 + '", "8+")],
)
@pytest.mark.parametrize("field", ["cpus", "memory_gib"])
def test_amounts_have_one_spelling(field, value, canonical):
    assert job(f"{{{field}: {value}}}").public_dict()["resources"][field] == canonical


@pytest.mark.parametrize("value", ["0", "-1", "16-", "many", "[1]", "16GB", "true"])
def test_amounts_that_are_none_are_refused(value):
    assert only_problem(f"{{cpus: {value}}}").path == "resources.cpus"


def test_ranks_that_cannot_share_the_accelerators_give_a_warning():
    text = VALID.replace("ranks_per_replica: 8\n", "ranks_per_replica: 3\n")
    checked = check_job(text + "resources: {accelerators: MI300X:8}\n")

    assert checked.job is not None
    assert "ranks_per_replica: 8" in (checked.problems[0].fix or "")


def test_a_resources_object_made_in_python_reads_the_same_spellings():
    assert Resources(accelerators="mi300x : 8") == Resources(accelerators={"MI300X": 8})
