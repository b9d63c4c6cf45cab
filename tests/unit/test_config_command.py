"""Which commands run without a shell; bash itself is the judge."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sky_monarch.config import rank_command
from sky_monarch.config.command import _BASH_WORDS

PRINT = "/usr/bin/printf '%s\\0' "
"""Prints each of its arguments, ended by NUL; by its path it is no builtin."""


def argv(run: str) -> list[str] | None:
    command = rank_command(run)
    if command["kind"] == "shell":
        assert command == {"kind": "shell", "script": run}
        return None
    return command["argv"]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("python train.py", ["python", "train.py"]),
        ("python -m pkg.mod --lr=1e-3\n", ["python", "-m", "pkg.mod", "--lr=1e-3"]),
        ("  torchrun\t--x 'a b'  \n\n", ["torchrun", "--x", "a b"]),
        (
            "python train.py \\\n  --steps 10 \\\n  --out x\n",
            ["python", "train.py", "--steps", "10", "--out", "x"],
        ),
        ("# what it does\n\npython train.py # and why\n# bye\n", ["python", "train.py"]),
        ("python a#b", ["python", "a#b"]),
        ('./run.sh a\\ b "c \\"d\\" \\n" \'\'', ["./run.sh", "a b", 'c "d" \\n', ""]),
        (
            "python -c 'import os; print(os.environ[\"A\"])'",
            ["python", "-c", 'import os; print(os.environ["A"])'],
        ),
        ("'my prog' x", ["my prog", "x"]),
        ("/bin/echo hi", ["/bin/echo", "hi"]),
        ("python x.py a=b %d ^ @x +1 , é🎉", ["python", "x.py", "a=b", "%d", "^", "@x", "+1", ",", "é🎉"]),
        ("py\\\nthon x", ["python", "x"]),
        ('python "a\\\nb"', ["python", "ab"]),
        ("python x !", ["python", "x", "!"]),
    ],
)
def test_one_simple_command_is_executed_without_a_shell(run, expected):
    assert argv(run) == expected


@pytest.mark.parametrize(
    "run",
    [
        "a | b",
        "a && b",
        "a; b",
        "a & ",
        "a\nb",
        "a > out",
        "a < in",
        "a 2>&1",
        "(a)",
        "echo $HOME x",
        "a $HOME",
        'a "$HOME"',
        "a `b`",
        'a "`b`"',
        "a *.py",
        "a ?",
        "a [x]",
        "a {1,2}",
        "~/run.sh",
        "a ~",
        "A=1 python x",
        "A+=1",
        "cd x",
        ". ./env",
        "source env",
        "exec python x",
        "export A=1",
        "ulimit -n 9",
        "eval x",
        "if true; then a; fi",
        "while a; do b; done",
        "! a",
        "time a",
        "[ -f x ]",
        "[[ a ]]",
        "{ a; }",
        "echo hi",
        "true",
        "test -f x",
        "'cd' x",
        "\\cd x",
        "a 'unclosed",
        'a "unclosed',
        "a \\",
        "",
        "  \n",
        "# only",
        "'' x",
        "cat <<E\nx\nE",
        "a\0b",
        "a\rb",
        "function f",
        "python x.py\npython y.py",
        "a $'x'",
        "command python x",
        "a=b",
    ],
)
def test_anything_else_is_left_to_bash(run):
    assert argv(run) is None


pieces = st.sampled_from(
    [
        "a",
        "b=",
        "é",
        "-",
        ".",
        "/",
        "%",
        "^",
        "@",
        "+",
        ":",
        "!",
        ",",
        "#",
        " ",
        " ",
        " ",
        "\t",
        "\\\n",
        "\\ ",
        "\\a",
        "\\'",
        "'a b'",
        "'\"$*'",
        "'\n'",
        "''",
        '""',
        '"a b"',
        '"\\"\\$\\`\\\\"',
        '"\\a\\n"',
        '"\\\n"',
        "\n",
        "'",
        '"',
        "\\",
        "$",
        "*",
        "~",
        "{a,b}",
        "[a]",
        "?",
        "|",
        "&",
        ";",
        "<",
        ">",
        "(",
        "`",
        "\r",
    ]
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.lists(pieces, max_size=9).map("".join))
def test_words_are_exactly_those_that_bash_would_pass(tail):
    run = PRINT + tail
    words = argv(run)
    assume(words is not None)

    shell = subprocess.run(["bash", "-o", "pipefail", "-c", run], capture_output=True, check=False)
    direct = subprocess.run(words, capture_output=True, check=False)

    assert (direct.stdout, direct.returncode) == (shell.stdout, shell.returncode)


def test_no_word_that_bash_itself_carries_out_is_executed_as_a_program():
    listed = subprocess.run(
        ["bash", "-c", "compgen -b; compgen -k"], capture_output=True, text=True, check=True
    )
    words = set(listed.stdout.split())

    assert len(words) > 60
    assert [word for word in words if argv(f"{word} x") is not None] == []
    assert {"cd", "exec", "time"} <= _BASH_WORDS
