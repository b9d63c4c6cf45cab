"""What each field takes: durations, names, paths, modules, timeouts."""

from __future__ import annotations

import pytest

from sky_monarch.config import JobSpec, check_job, load_job

VALID = "name: demo\nreplicas: 3\nrun: python train.py\n"


def problems_of(text: str) -> dict[str, object]:
    return {problem.path: problem for problem in check_job(text).problems}


def only_problem(text: str):
    problems = check_job(text).problems
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


@pytest.mark.parametrize(
    ("line", "fix"),
    [("window_s: 10m", "write 600"), ("window_s: '30'", "write 30"), ("grace_s: 1.5h", "write 5400")],
)
def test_a_duration_with_a_unit_is_answered_with_its_seconds(line, fix):
    assert only_problem(f"{VALID}recovery: {{{line}}}\n").fix == fix


@pytest.mark.parametrize("value", ["-1", "true", ".nan", ".inf", "1e300", "[1]", "soon"])
@pytest.mark.parametrize("field", ["window_s", "grace_s", "startup_limit_s", "progress_limit_s"])
def test_a_duration_that_is_none_is_refused(field, value):
    assert only_problem(f"{VALID}recovery: {{{field}: {value}}}\n").path == f"recovery.{field}"


def test_limits_can_be_switched_off_and_zero_is_no_limit_at_all():
    recovery = load_job(VALID + "recovery: {startup_limit_s: off, progress_limit_s: off}\n").recovery
    assert (recovery.startup_limit_s, recovery.progress_limit_s) == ("off", "off")

    assert "write off" in only_problem(VALID + "recovery: {startup_limit_s: 0}\n").message
    assert only_problem(VALID + "recovery: {progress_limit_s: false}\n").suggestion == "off"
    assert only_problem(VALID + "recovery: {startup_limit_s: auto}\n").path == "recovery.startup_limit_s"


@pytest.mark.parametrize("value", ["2", "-1", "true", "'1'"])
def test_standby_is_zero_or_one(value):
    assert only_problem(f"{VALID}recovery: {{standby: {value}}}\n").path == "recovery.standby"
    assert load_job(VALID + "recovery: {standby: 0}\n").recovery.standby == 0


@pytest.mark.parametrize("section", ["resources", "recovery", "checkpoint", "logs", "lighthouse"])
def test_a_section_that_is_no_mapping_is_refused(section):
    assert only_problem(f"{VALID}{section}: [1]\n").path == section


def test_text_fields_take_their_text_as_typed():
    job = load_job("name: 2026-01-02\nreplicas: 1\nrun: true\n")

    assert (job.name, job.run) == ("2026-01-02", "true")


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("a b/ü", "a-b-u"),
        ("Train_1", "train-1"),
        ("-x-", "x"),
        ("..", "job"),
        ("a" * 80, "a" * 40),
        ("日本", "job"),
        ("../etc", "etc"),
        ("a\\nb", "a-nb"),
    ],
)
def test_a_bad_name_is_refused_with_a_usable_one(name, suggestion):
    problem = only_problem(f"name: '{name}'\nreplicas: 1\nrun: x\n")

    assert (problem.path, problem.suggestion) == ("name", suggestion)
    assert load_job(f"name: {suggestion}\nreplicas: 1\nrun: x\n").name == suggestion


@pytest.mark.parametrize("run", ["''", "'  '", "'# only a comment'", "|\n  \n  # nothing\n"])
def test_a_run_without_a_command_is_refused(run):
    assert only_problem(f"name: a\nreplicas: 1\nrun: {run}\n").path == "run"


def test_a_run_as_a_list_is_answered_with_the_line_to_write():
    problem = only_problem("name: a\nreplicas: 1\nrun: [python, 'my train.py']\n")

    assert "python 'my train.py'" in (problem.fix or "")


def test_the_workdir_is_taken_relative_to_the_job_file(tmp_path):
    (tmp_path / "code").mkdir()
    file = tmp_path / "job.yaml"
    file.write_text(VALID + "workdir: code\ncheckpoint: {to: ../saved, every_steps: 5}\n")

    job = load_job(file)

    assert job.workdir == str(tmp_path / "code")
    assert job.checkpoint is not None
    assert job.checkpoint.to == str(tmp_path.parent / "saved")
    assert load_job(str(file)) == job


@pytest.mark.parametrize(
    "workdir", ["nowhere", "job.yaml", "~nobody-of-that-name/x", "''", "a" * 5000, '"a\\0b"']
)
def test_a_workdir_that_is_no_folder_is_refused(tmp_path, workdir):
    file = tmp_path / "job.yaml"
    file.write_text(f"{VALID}workdir: {workdir}\n")

    checked = check_job(file)

    assert [(problem.path, problem.line) for problem in checked.problems] == [("workdir", 4)]


def test_a_checkpoint_needs_a_folder_and_a_rhythm(tmp_path):
    assert set(problems_of(VALID + "checkpoint: {keep: 1}\n")) == {"checkpoint.to", "checkpoint.every_steps"}
    unknown = only_problem(VALID + "checkpoint: {to: 'nowhere://b/c', every_steps: 1}\n")
    assert (unknown.path, unknown.fix) == (
        "checkpoint.to",
        "name a folder, or a URL such as s3://bucket/folder",
    )
    (tmp_path / "file").touch()
    assert (
        only_problem(f"{VALID}checkpoint: {{to: {tmp_path}/file, every_steps: 1}}\n").path == "checkpoint.to"
    )


@pytest.mark.parametrize(
    ("value", "suggestion"), [("[train.py]", "train"), ("[src/data.py]", "src.data"), ("[a b]", None)]
)
def test_preload_takes_importable_names_only(value, suggestion):
    problem = only_problem(f"{VALID}preload: {value}\n")

    assert (problem.path, problem.suggestion) == ("preload", suggestion)


def test_a_standby_goes_as_far_as_its_imports_or_its_session():
    assert load_job(VALID).recovery.standby_until == "imports", "running a script twice at once is asked for"
    assert load_job(VALID + "recovery: {standby_until: session}\n").recovery.standby_until == "session"
    problem = only_problem(VALID + "recovery: {standby_until: hot}\n")
    assert problem.path == "recovery.standby_until"
    assert problem.suggestion == "session"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("recovery: {standby: 0, standby_until: session}\n", "while recovery.standby is 0"),
        ("run: cd x && python y.py\nrecovery: {standby_until: session}\n", "one python command"),
        (
            "resources: {accelerators: MI300X:1}\nrecovery: {standby_until: session}\n",
            "second copy of the model",
        ),
    ],
)
def test_a_hot_standby_that_is_useless_or_dear_gives_a_warning_and_a_job(text, words):
    valid = VALID if "run:" not in text else VALID.replace(f"run: {load_job(VALID).run}\n", "")
    checked = check_job(valid + text)
    assert checked.job is not None
    (problem,) = (problem for problem in checked.problems if problem.path == "recovery.standby_until")
    assert problem.severity == "warning"
    assert words in problem.message


def test_preload_that_no_standby_can_use_gives_a_warning_and_a_job():
    for text in ("recovery: {standby: 0}\n", "run: cd x && python y.py\n"):
        base = VALID.replace("run: python train.py\n", "") if text.startswith("run") else VALID
        checked = check_job(base + "preload: [json]\n" + text)
        assert isinstance(checked.job, JobSpec)
        assert [(problem.path, problem.severity) for problem in checked.problems] == [("preload", "warning")]


@pytest.mark.parametrize(
    ("infra", "words", "meant"),
    [
        (
            "slurm/a/b/c/d",
            "names more than a cluster and a partition: the form is slurm/CLUSTER/PARTITION",
            "slurm/a/b",
        ),
        ("ssh/pool/host", "names more than a pool: the form is ssh/POOL", "ssh/pool"),
        ("aws/us-east-1/a/b", "the form is aws/REGION/ZONE", "aws/us-east-1/a"),
        ("k8s/", "has nothing after a /", "k8s"),
        ("Kubernetes//context", "has nothing after a /", "k8s/context"),
        ("local/", "local takes no /", "local"),
    ],
)
def test_a_place_has_the_parts_of_its_kind_and_no_others(infra, words, meant):
    checked = check_job(f"{VALID}infra: {infra}\n")

    (problem,) = checked.problems
    assert words in problem.message
    assert problem.suggestion == meant


def test_the_name_of_a_context_may_hold_slashes():
    infra = "k8s/arn:aws:eks:us-east-1:1234:cluster/prod"
    assert load_job(f"{VALID}infra: {infra}\n").infra == infra


@pytest.mark.parametrize("infra", ["local", "Slurm/c1/gpu", "k8s", "runpod", "aws/us-east-1/a"])
def test_infra_is_text_that_the_schema_accepts(infra):
    head, slash, tail = infra.partition("/")
    assert load_job(f"{VALID}infra: {infra}\n").infra == head.lower() + slash + tail


@pytest.mark.parametrize(
    "order",
    ["join_timeout_s: 601", "process_group_timeout_s: 600", "heartbeat_timeout_s: 30, join_timeout_s: 60"],
)
def test_timeouts_out_of_order_are_refused_with_the_required_order(order):
    problem = only_problem(f"{VALID}lighthouse: {{{order}}}\n")

    assert problem.path == f"lighthouse.{order.partition(':')[0]}"
    assert problem.line == 4
    assert "heartbeat_timeout_s < process_group_timeout_s < quorum_timeout_s" in (problem.fix or "")


def test_a_lighthouse_may_be_named_alone_or_with_its_timeouts():
    short = load_job(VALID + "lighthouse: torchft\n")
    assert short.lighthouse.kind == "torchft"
    assert short == load_job(VALID + "lighthouse: {kind: torchft, quorum_timeout_s: 600}\n")

    assert only_problem(VALID + "lighthouse: torch-ft\n").suggestion == "torchft"
