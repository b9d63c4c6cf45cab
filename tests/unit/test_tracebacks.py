"""The one line of a traceback that a person wants to see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sky_monarch.tracebacks import culprit, hung_at

HEADER = "Traceback (most recent call last):"
MINE = '  File "/home/me/train.py", line 12, in step'
TORCH = '  File "/usr/lib/python3/site-packages/torch/nn/modules/module.py", line 1511, in _call_impl'
OURS = '  File "/src/sky_monarch/training/session.py", line 240, in step_optimizer'
RECIPE = '  File "/src/sky_monarch/training/recipes/byte_lm.py", line 9, in main'
CHECKOUT = '  File "/src/pytorch/torch/nn/functional.py", line 3, in relu'


@pytest.mark.parametrize(
    ("lines", "exception", "where"),
    [
        (
            [HEADER, MINE, "    loss()", TORCH, "    f()", "ValueError: x"],
            "ValueError: x",
            "/home/me/train.py:12",
        ),
        ([HEADER, MINE, OURS, "QuorumError: x"], "QuorumError: x", "/home/me/train.py:12"),
        ([HEADER, RECIPE, OURS, "QuorumError: x"], "QuorumError: x", RECIPE.split('"')[1] + ":9"),
        ([HEADER, MINE, CHECKOUT, "E: x"], "E: x", "/home/me/train.py:12"),
        ([HEADER, TORCH, "ValueError: x"], "ValueError: x", TORCH.split('"')[1] + ":1511"),
        ([HEADER, MINE, "my.Broken: x", "more", "done: y"], "my.Broken: x", "/home/me/train.py:12"),
        (
            [HEADER, TORCH, "KeyError: 1", "", "During handling of …:", "", HEADER, MINE, "ValueError: x"],
            "ValueError: x",
            "/home/me/train.py:12",
        ),
        (
            [f"[rank1]: {line}" for line in (HEADER, MINE, "    f()", "RuntimeError: x")],
            "RuntimeError: x",
            "/home/me/train.py:12",
        ),
        (["step 1", "KeyboardInterrupt"], "KeyboardInterrupt", None),
        (["loss: 2.5", "all is well"], None, None),
        ([], None, None),
    ],
)
def test_the_exception_and_the_line_of_the_users_own_code_are_found(
    lines: list[str], exception: str | None, where: str | None
) -> None:
    found = culprit(lines)
    assert (found.exception, found.where) == (exception, where)


@pytest.mark.parametrize(
    ("source", "exception", "line"),
    [
        ("import json\n\njson.loads('{')\n", "json.decoder.JSONDecodeError", 3),
        ("class Broken(Exception): pass\nraise Broken\n", "Broken", 2),
        ("def f(:\n", "SyntaxError", 1),
        ("raise ExceptionGroup('two', [ValueError(1), TypeError(2)])\n", None, 1),
        ("def f(n):\n    return f(n + 1)\nf(0)\n", "RecursionError", 2),
    ],
)
def test_what_python_itself_prints_is_understood(
    tmp_path: Path, source: str, exception: str | None, line: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    found = culprit(done.stderr.splitlines())
    assert found.where == f"{script}:{line}", done.stderr
    assert exception is None or (found.exception or "").startswith(exception), done.stderr


DUMP = """
import faulthandler, sys, threading
ready = threading.Event()
def other():
    ready.wait(60)
threading.Thread(target=other, daemon=True).start()
def lost():
    faulthandler.dump_traceback_later(0.3, exit=True, file=sys.stdout); ready.wait(60)
lost()
"""


def test_a_dump_of_stacks_says_where_the_main_thread_was(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DUMP)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert hung_at(done.stdout.splitlines()) == f"{script}:8 in lost", done.stdout
    assert hung_at(["nothing"]) is None
