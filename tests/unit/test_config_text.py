"""Bytes, encodings, YAML's dark corners, and files that are out to hurt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sky_monarch.config import check_job, load_job

VALID = "name: demo\nreplicas: 2\nrun: python train.py\n"
EMOJI = "# Grüße 🎉\nname: demo\nreplicas: 2\nenvs: {A: 'é🎉'}\nrun: |\n  echo 'é🎉'\n  python train.py\n"


def only_problem(source, **options):
    problems = check_job(source, **options).problems
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


def test_line_ends_a_byte_order_mark_and_comments_do_not_change_the_plan(tmp_path):
    data = EMOJI.encode()
    forms = {
        "lf": data,
        "crlf": data.replace(b"\n", b"\r\n"),
        "cr": data.replace(b"\n", b"\r"),
        "bom": b"\xef\xbb\xbf" + data,
        "bom-crlf": b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"),
        "comment": data + "# 🎉 bye".encode(),
        "json": json.dumps(
            {
                "run": "echo 'é🎉'\npython train.py\n",
                "replicas": 2,
                "name": "demo",
                "envs": {"A": "é🎉"},
            }
        ).encode(),
    }
    jobs = {}
    for name, content in forms.items():
        file = tmp_path / f"{name}.yaml"
        file.write_bytes(content)
        jobs[name] = load_job(file)

    assert len({job.digest() for job in jobs.values()}) == 1
    assert all(job.envs == {"A": "é🎉"} and "\r" not in job.run for job in jobs.values())


def test_a_carriage_return_written_as_an_escape_does_not_reach_the_script():
    job = load_job('name: a\nreplicas: 1\nrun: "a\\r\\nb\\rc"\nsetup: "x\\r\\n"\n')

    assert (job.run, job.setup) == ("a\nb\nc", "x")


def test_every_difference_of_content_changes_the_digest():
    base = load_job(VALID + "envs: {A: b}\nsecrets: {S: s}\n")
    others = [
        VALID.replace("2", "3") + "envs: {A: b}\nsecrets: {S: s}\n",
        VALID + "envs: {A: c}\nsecrets: {S: s}\n",
        VALID + "envs: {A: b}\nsecrets: {T: s}\n",
        VALID + "envs: {A: b}\nsecrets: {S: s}\nlogs: {segments: 9}\n",
        VALID + "envs: {A: b}\nsecrets: {S: s}\nresources: {accelerators: MI300X:8}\n",
    ]
    assert len({base.digest(), *(load_job(text).digest() for text in others)}) == 6
    assert load_job(VALID + "envs: {A: b}\nsecrets: {S: other}\n").digest() == base.digest()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (VALID.encode("utf-16"), "it is UTF-16"),
        (VALID.encode("utf-16-le"), "it is UTF-16"),
        (VALID.encode("utf-16-be"), "it is UTF-16"),
        (VALID.encode("utf-32"), "it is UTF-32"),
        (b"\x7fELF\x02\x01\x01\0\x03" + b"abc" * 20, "it is binary"),
        (b"PK\x03\x04\0\0" + bytes(range(256)), "it is"),
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"\n \n# only this\n", "is empty"),
        (b"---\n", "is empty"),
        (b"---\n...\n", "is empty"),
        (b"- name: a\n", "the job file is a list"),
        (b"just words\n", "the job file is one text"),
        (b"'quoted'\n", "the job file is one text"),
        (b"null\n", "the job file is one text"),
        (b"x" * 10_000_000, "it is larger than 256 KiB"),
    ],
)
def test_a_file_that_is_no_job_file_is_refused_in_one_line(tmp_path, data, message):
    file = tmp_path / "job.yaml"
    file.write_bytes(data)

    problem = only_problem(file)

    assert problem.message.startswith(message)
    assert problem.fix
    assert "\n" not in str(problem)


def test_a_byte_that_is_no_utf8_is_named_with_its_place(tmp_path):
    problem = only_problem(VALID.encode() + "# é".encode() + b" \xff\n")

    assert (problem.line, problem.column, problem.message) == (4, 5, "it is no UTF-8: byte 0xff")


def test_a_character_that_yaml_cannot_hold_is_named_with_its_place():
    problem = only_problem(VALID + "envs: {A: 'x\u2028y'}\n")

    assert (problem.line, problem.column) == (4, 13)
    assert "U+2028" in problem.message


def test_paths_that_are_no_job_file_are_refused_in_one_line(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, message in [
        (tmp_path / "missing.yaml", "there is no such file"),
        (tmp_path, "it is a folder"),
        (tmp_path / "pipe", "it is no regular file"),
        (Path("/dev/zero"), "it is no regular file"),
        (tmp_path / ("x" * 300), "it cannot be opened"),
        (tmp_path / "pipe" / "x", "it cannot be opened"),
        ("a\0b", "it cannot be opened"),
        ("", "it is a folder"),
        ("\ud800", "it cannot be opened"),
    ]:
        problem = only_problem(path)
        assert problem.message.startswith(message), (path, problem)


def test_a_file_that_may_not_be_read_is_refused(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(VALID)
    file.chmod(0)
    if os.geteuid() != 0:
        assert only_problem(file).message == "it may not be read by you"
        return
    # root reads everything: drop to nobody after the imports, which may lie in a folder of root's
    code = (
        f"import os; from sky_monarch.config import check_job; check_job({VALID!r});"
        f"os.setuid(65534); print(check_job({str(file)!r}).problems[0])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert out.stdout.startswith("it may not be read by you")


@pytest.mark.parametrize(
    ("text", "path", "lines"),
    [
        ("name: a\nreplicas: 1\nrun: x\nreplicas: 2\n", "replicas", "lines 2 and 4"),
        ("name: a\nreplicas: 1\nrun: x\nenvs:\n  A: b\n  A: b\n", "envs.A", "lines 5 and 6"),
        (
            "name: a\nreplicas: 1\nrun: x\nrecovery: {grace_s: 1,\n  grace_s: 1}\n",
            "recovery.grace_s",
            "lines 4 and 5",
        ),
        ("name: a\nreplicas: 1\nrun: x\n'run': y\n", "run", "lines 3 and 4"),
    ],
)
def test_a_key_given_twice_is_refused_with_both_lines(text, path, lines):
    problem = only_problem(text)

    assert problem.path == path
    assert lines in problem.message


def test_two_duplicates_and_a_typo_are_all_reported():
    problems = check_job("name: a\nname: b\nreplicas: 1\nreplicas: 2\nrun: x\nzz: 1\n").problems

    assert [(problem.path, problem.line) for problem in problems] == [("name", 2), ("replicas", 4), ("zz", 6)]


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("name: a\nrun: echo: x\n", 2, 10, "quotes"),
        ("name: a\nresources:\n\tcpus: 3\n", 3, 1, "tab"),
        ("name: [a, b\n", 2, 1, "expected"),
        ("name: 'a\n", 2, 1, "end of stream"),
        ("name: a\nrun: *x\n", 2, 6, "anchor"),
        ("name: a\nrun: @x\n", 2, 6, "quotes"),
        ("name: a\nrun: %x\n", 2, 6, "quotes"),
        ("name: a\n  run: x\n", 2, 6, "mapping values"),
        ("name: a\nrun: !python/object:os.system x\n", 2, 6, "tag"),
        ("name: a\n---\nname: b\n", 2, 1, "more than one document"),
        ("%YAML 1.1\n---\nname: a\n", 2, 1, "YAML 1.2"),
        ("name: a\n? [x, y]\n: z\n", 2, 3, "a key must be text"),
        ("name: a\n<<: [b]\n", 2, 5, "merges mappings only"),
    ],
)
def test_bad_yaml_is_refused_with_its_place(text, line, column, words):
    problem = only_problem(text)

    assert (problem.line, problem.column) == (line, column)
    assert words in str(problem)


def test_tabs_inside_a_script_are_kept():
    assert (
        load_job("name: a\nreplicas: 1\nrun: |\n  if true; then\n  \techo\tx\n  fi\n").run
        == "if true; then\n\techo\tx\nfi"
    )


def test_anchors_and_merge_keys_work_and_explicit_keys_win():
    text = (
        "name: a\nreplicas: &n 3\nmin_replicas: *n\nrun: x\n"
        "envs: &e {A: 010, B: base}\n"
        "resources:\n  any_of:\n  - &spot {use_spot: true, cpus: 8}\n  - {<<: *spot, use_spot: false}\n"
        "  - {<<: [{cpus: 4}, *spot]}\n"
    )
    job = load_job(text)

    assert job.min_replicas == 3
    assert [(option.cpus, option.use_spot) for option in job.resources.any_of or ()] == [
        ("8", True),
        ("8", False),
        ("4", True),
    ]


def test_a_problem_behind_an_alias_is_placed():
    problem = only_problem("name: a\nreplicas: 1\nrun: x\nlogs: {segments: &z 0}\n")

    assert (problem.line, problem.column) == (4, 18)


def test_yaml_1_2_directive_document_marks_and_standard_tags_are_fine():
    assert (
        load_job("%YAML 1.2\n---\n" + VALID + "envs: {A: !!str 010, B: ! x, C: !!int 010}\n...\n").envs["A"]
        == "010"
    )


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000 + "\n",
        "{a: " * 60_000 + "\n",
        "- " * 120_000 + "\n",
        "? " * 120_000 + "\n",
        "[{" * 100_000 + "\n",
        "a: [" + "1," * 120_000 + "]\n",
        "a: &a [*a]\n",
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(9)
        ),
        "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: *a{i - 1}, k{i}: 1}}\n" for i in range(1, 4000)),
        "a: &a " + "x" * 200_000 + "\nb: [" + "*a," * 10_000 + "]\n",
        'a: "\\UFFFFFFFF"\n',
        "a: " + "9" * 200_000 + "\n",
        "a: b\n" * 50_000,
        "!" * 250_000 + "\n",
        "&a " * 80_000 + "\n",
    ],
    ids=range(15),
)
def test_a_bomb_is_refused_in_bounded_time(text):
    started = time.process_time()

    checked = check_job(text)

    assert checked.job is None
    assert time.process_time() - started < 20  # measured: 3 s at most on a quiet core
    assert all(len(str(problem)) < 1000 for problem in checked.problems)


def test_a_large_but_honest_file_is_read():
    names = "".join(f"  NAME_{index}: value number {index}\n" for index in range(5000))

    assert len(load_job(VALID + "envs:\n" + names).envs) == 5000
