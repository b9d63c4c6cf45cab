"""A promoted standby must not be distinguishable from ``python x.py``: every test runs both and compares."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from sky_monarch import stacks
from sky_monarch.tracebacks import hung_at
from sky_monarch.worker import Command, UsageError

REPO = Path(__file__).parents[2]
LIMIT_S = 60


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPO), **extra}


def run_directly(
    command: Sequence[str], cwd: Path, *, limit_s: float = LIMIT_S, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


class Standby:
    """A standby process and the agent's end of its descriptor 3."""

    def __init__(
        self, command: Sequence[str], cwd: Path, *, preload: str = "", options: Sequence[str] = ()
    ) -> None:
        self.agent, theirs = socket.socketpair()
        self.said: list[str] = []
        argv = [sys.executable, "-m", "sky_monarch.worker", "--standby"]
        argv += ["--preload", preload] if preload else []
        argv += [*options, "--", sys.executable, *command]
        self.process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.dup2(theirs.fileno(), 3),
            pass_fds=[3],
        )
        theirs.close()
        self.agent.settimeout(LIMIT_S)

    def promote(self, **env: str) -> subprocess.CompletedProcess[str]:
        said = b""
        while not said.endswith(b"ready\n"):
            if not (part := self.agent.recv(4096)):
                raise AssertionError(self.finish())
            said += part
        self.said = said.decode().splitlines()[:-1]
        self.agent.sendall(json.dumps({"env": env}).encode() + b"\n")
        return self.finish()

    def finish(self) -> subprocess.CompletedProcess[str]:
        try:
            out, err = self.process.communicate(timeout=LIMIT_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.agent.close()
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)


def assert_alike(command: Sequence[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    direct = run_directly(command, cwd, **env)
    warm = Standby(command, cwd).promote(**env)
    assert warm.stdout == direct.stdout
    assert warm.stderr == direct.stderr
    assert warm.returncode == direct.returncode
    return direct


DUMP = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "path": sys.path, "name": __name__, "file": __file__,
    "package": __package__, "spec": repr(__spec__).split(" object at ")[0],
    "cached": repr(globals().get("__cached__")),
    "loader": type(__loader__).__name__, "loader_path": getattr(__loader__, "path", None), "doc": __doc__,
    "names": sorted(globals()), "main": sys.modules["__main__"].__dict__ is globals(), "cwd": os.getcwd(),
    "builtins": type(__builtins__).__name__, "flags": list(sys.flags), "warn": sys.warnoptions,
    "env": os.environ.get("TOLD"), "sigint": str(__import__("signal").getsignal(2)).split(" at ")[0],
    "sigterm": str(__import__("signal").getsignal(15)),
    "fds": sorted(set(os.listdir("/proc/self/fd")) - {"0", "1", "2"})[1:],
}, indent=1, default=str))
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "sub" / "package").mkdir(parents=True)
    (tmp_path / "sub" / "dump.py").write_text(DUMP)
    (tmp_path / "sub" / "sibling.py").write_text("WHO = 'sibling'\n")
    (tmp_path / "sub" / "package" / "__init__.py").write_text("")
    (tmp_path / "sub" / "package" / "__main__.py").write_text(DUMP)
    (tmp_path / "sub" / "link.py").symlink_to(tmp_path / "sub" / "package" / "__main__.py")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ["sub/dump.py", "--steps", "3", "-m", "", "a b"],
        ["./sub/../sub/dump.py"],
        ["sub/link.py"],
        ["sub/package"],
        ["-O", "-W", "error::UserWarning", "-X", "utf8", "sub/dump.py"],
        ["-P", "sub/dump.py"],
        ["-msub.dump", "x"],
        ["-B", "-m", "sub.package", "x"],
    ],
    ids=" ".join,
)
def test_a_script_sees_what_it_sees_when_python_runs_it(scripts: Path, command: list[str]) -> None:
    assert '"env": "yes"' in assert_alike(command, scripts, TOLD="yes").stdout


@pytest.mark.parametrize(
    "body",
    [
        "raise SystemExit(7)",
        "import sys; sys.exit('a message')",
        "import sys; sys.exit()",
        "raise SystemExit(None)",
        "def f():\n    raise ValueError('boom\\nsecond line')\nf()",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('wrapped') from e",
        "x = (",
        "raise KeyboardInterrupt",
        "import atexit\natexit.register(lambda: print('bye', __name__))\nraise LookupError",
        "import sys\nsys.excepthook = lambda *a: print(a[0], a[2].tb_lineno, a[2].tb_next)\nraise OSError",
        "import threading\nthreading.Thread(target=lambda: print('late')).start()",
        "import sibling; print(sibling.WHO)",
        "import pickle\nclass C: pass\nprint(type(pickle.loads(pickle.dumps(C()))) is C)",
        "# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))",
        "import os; os.abort()",
    ],
)
def test_a_script_ends_as_it_ends_when_python_runs_it(scripts: Path, body: str) -> None:
    (scripts / "sub" / "case.py").write_text(body, encoding="latin-1")
    assert_alike(["sub/case.py"], scripts)


@pytest.mark.parametrize(
    "command", [["nosuch.py"], ["-m", "nosuch"], ["sub"], ["-m", "sub.nosuch"]], ids=" ".join
)
def test_a_script_that_is_not_there_is_reported_as_python_reports_it(
    scripts: Path, command: list[str]
) -> None:
    assert assert_alike(command, scripts).returncode != 0


def test_a_traceback_of_a_module_reads_as_with_python_m(scripts: Path) -> None:
    (scripts / "sub" / "case.py").write_text("def f():\n    raise ValueError('boom')\nf()\n")
    assert "sky_monarch" not in assert_alike(["-m", "sub.case"], scripts).stderr


def test_spawned_children_find_the_main_module(scripts: Path) -> None:
    (scripts / "sub" / "case.py").write_text(
        "import multiprocessing as mp\n"
        "def work(x): return x + 1\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(1) as pool: print(pool.map(work, [1]))\n"
    )
    assert assert_alike(["sub/case.py"], scripts).stdout == "[2]\n"


def test_preload_happens_before_the_promotion_and_with_the_scripts_own_path(scripts: Path) -> None:
    (scripts / "sub" / "case.py").write_text(
        "import sys; print('sibling' in sys.modules, 'decimal' in sys.modules)"
    )
    standby = Standby(["sub/case.py"], scripts, preload="sibling,decimal,nosuchmodule")
    done = standby.promote()
    assert done.stdout == "True True\n"
    assert done.stderr.count("\n") == 1
    assert "cannot import nosuchmodule" in done.stderr
    assert standby.said == [
        "short cannot import nosuchmodule: ModuleNotFoundError: No module named 'nosuchmodule'"
    ], "its agent hears of it"


def test_a_standby_that_is_promoted_before_it_is_ready_runs_all_the_same(scripts: Path) -> None:
    (scripts / "slow_import.py").write_text(
        "import pathlib, time\nwhile not pathlib.Path('promoted').exists():\n    time.sleep(0.01)\n"
    )
    (scripts / "early.py").write_text("import os; print(os.environ['GENERATION'])")
    standby = Standby(["early.py"], scripts, preload="slow_import")
    standby.agent.sendall(json.dumps({"env": {"GENERATION": "7"}}).encode() + b"\n")
    standby.agent.close()  # as the agent does: it has nothing more to say or to hear
    (scripts / "promoted").touch()
    out, err = standby.process.communicate(timeout=LIMIT_S)
    assert (out, err, standby.process.returncode) == ("7\n", "", 0)


def test_a_promoted_standby_answers_its_agent_with_its_stacks_though_it_has_no_session(scripts: Path) -> None:
    (scripts / "hangs.py").write_text(
        "import os, signal\n"
        "def lost():\n"
        f"    os.kill(os.getpid(), {stacks.SIGNAL})\n"
        "lost()\n"
        "print(open(os.environ['SKY_MONARCH_STACKS']).read())\n"
    )
    dump = scripts / "r1-0-g2.stacks"
    done = Standby(["hangs.py"], scripts).promote(SKY_MONARCH_STACKS=str(dump))
    assert done.returncode == 0, done.stderr
    assert hung_at(done.stdout.splitlines()) == f"{scripts / 'hangs.py'}:3 in lost"
    assert dump.stat().st_mode & 0o777 == 0o600


def test_without_a_place_for_stacks_a_rank_runs_all_the_same(scripts: Path) -> None:
    (scripts / "runs.py").write_text("print('runs')")
    done = Standby(["runs.py"], scripts).promote(SKY_MONARCH_STACKS="/nowhere/at/all")
    assert (done.returncode, done.stdout, done.stderr) == (0, "runs\n", "")


def test_a_standby_that_nobody_needs_leaves_quietly(scripts: Path) -> None:
    standby = Standby(["sub/dump.py"], scripts)
    assert standby.agent.recv(100) == b"ready\n"
    standby.agent.shutdown(socket.SHUT_WR)
    done = standby.finish()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("line", [b"nonsense\n", b"[]\n", b'{"env": {"A": 1}}\n', b'{"env": {'])
def test_a_malformed_promotion_runs_nothing_and_shows_no_content(scripts: Path, line: bytes) -> None:
    standby = Standby(["sub/dump.py"], scripts)
    assert standby.agent.recv(100) == b"ready\n"
    standby.agent.sendall(line)
    standby.agent.shutdown(socket.SHUT_WR)
    done = standby.finish()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: worker: the promotion")
    assert "nonsense" not in done.stderr


def test_an_interrupt_ends_a_waiting_standby_without_a_word(scripts: Path) -> None:
    standby = Standby(["sub/dump.py"], scripts)
    assert standby.agent.recv(100) == b"ready\n"
    standby.process.send_signal(signal.SIGINT)
    done = standby.finish()
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_waiting_standby_has_one_thread_and_no_torch(scripts: Path) -> None:
    standby = Standby(["sub/dump.py"], scripts)
    assert standby.agent.recv(100) == b"ready\n"
    assert len(list(Path(f"/proc/{standby.process.pid}/task").iterdir())) == 1
    assert "libtorch" not in Path(f"/proc/{standby.process.pid}/maps").read_text()
    standby.agent.shutdown(socket.SHUT_WR)
    standby.finish()


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["python"],
        ["python", "-c", "pass"],
        ["python", "-m"],
        ["python", "-"],
        ["python", "-O"],
        ["python", "x.pyc"],
    ],
    ids=" ".join,
)
def test_a_command_that_cannot_run_warm_is_refused(command: list[str]) -> None:
    with pytest.raises(UsageError):
        Command.parse(command)


def test_bad_usage_exits_2_with_one_line(tmp_path: Path) -> None:
    started = time.monotonic()
    done = run_directly(["-m", "sky_monarch.worker", "--standby", "--", "python", "-c", "pass"], tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: worker: '-c' cannot run warm; start it cold\n")
    assert time.monotonic() - started < LIMIT_S
