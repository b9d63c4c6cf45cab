"""What a job runs is looked for before anything is started, as far as it is certain that it is not there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sky_monarch.config import JobSpec, load_job
from sky_monarch.errors import ConfigError
from sky_monarch.launch.environment import job_environment
from sky_monarch.launch.runnable import require_preload, require_runnable

Make = Callable[..., JobSpec]


@pytest.fixture
def job(tmp_path: Path) -> Make:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "tool.sh").write_text("")
    (tmp_path / "package").mkdir()

    def make(run: str, more: str = "") -> JobSpec:
        return load_job(f"name: x\nreplicas: 1\nworkdir: {tmp_path}\nrun: {run}\n{more}")

    return make


@pytest.mark.parametrize(
    ("run", "said", "helps"),
    [
        ("python trian.py --steps 5", "run: trian.py is not there", "did you mean train.py?"),
        ("python -u -W error trian.py", "run: trian.py is not there", "begin at `workdir`"),
        ("python3 sub/train.py", "run: sub/train.py is not there", "begin at `workdir`"),
        ("torchrun --nproc_per_node 2 trian.py", "run: trian.py is not there", "did you mean train.py?"),
        ("./trian.py", "run: ./trian.py is not there", "did you mean ./train.py?"),
        ("./train.py", "may not be executed", "run: python ./train.py"),
        ("./package", "is a folder", "python"),
        ("train.py", "no program 'train.py' in PATH", "run: python train.py"),
        ("tool.sh", "no program 'tool.sh' in PATH", "run: ./tool.sh"),
        ("pyhton train.py", "no program 'pyhton' in PATH", "did you mean 'python'?"),
    ],
)
def test_a_command_that_is_certainly_not_there_is_refused_with_what_was_meant(
    job: Make, run: str, said: str, helps: str, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torchrun").touch(mode=0o755)
    env = {"PATH": f"{tmp_path / 'bin'}:{job_environment()['PATH']}"}
    with pytest.raises(ConfigError) as refused:
        require_runnable(job(run), here=env)
    assert said in str(refused.value)
    assert helps in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("run", "more"),
    [
        ("python train.py --file no.py", ""),
        ("python -m trian", ""),  # may be installed
        ("python -c 'import trian'", ""),
        ("cd sub && python trian.py", ""),  # a shell
        ("python $SCRIPT", ""),
        ("python trian.py", "setup: git clone https://example.com/x\n"),  # may bring it
        ("python package", ""),
        ("bash -c trian", ""),
        ("python", ""),
    ],
)
def test_nothing_is_said_of_what_is_there_or_not_certain(job: Make, run: str, more: str) -> None:
    require_runnable(job(run, more), here=job_environment())


def test_other_machines_have_programs_of_their_own_and_only_what_is_sent(job: Make) -> None:
    require_runnable(job("no-such-program train.py"), here=None)
    require_runnable(job("/opt/venv/bin/python train.py"), here=None, shipped={"train.py"})
    require_runnable(job("python /data/train.py"), here=None)
    with pytest.raises(ConfigError, match=r"trian\.py is not there"):
        require_runnable(job("python trian.py"), here=None, shipped={"train.py"})
    with pytest.raises(ConfigError, match=r"run: train\.py is not sent to the hosts"):
        require_runnable(job("python train.py"), here=None, shipped={"tool.sh"})


def test_a_module_to_preload_that_the_interpreter_does_not_have_is_refused(job: Make) -> None:
    env = job_environment()
    python = sys.executable
    require_preload(job(f"{python} train.py", "preload: [json, train, package, numpy.random]\n"), here=env)
    with pytest.raises(ConfigError, match="there is no module 'jsno'") as refused:
        require_preload(job(f"{python} train.py", "preload: [jsno]\n"), here=env)
    assert refused.value.hint == "did you mean 'json'?"
    for run, more in (
        (f"{python} train.py", "setup: pip install jsno\n"),
        (f"{python} train.py", "envs: {PYTHONPATH: /elsewhere}\n"),
        ("/other/venv/bin/python train.py", ""),
        (f"{python} train.py && true", ""),
    ):
        require_preload(job(run, f"preload: [jsno]\n{more}"), here=env)
