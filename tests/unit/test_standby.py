"""A hot standby: the script runs ahead, waits where it is told to, and is a rank from there on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from sky_monarch.errors import ConfigError
from sky_monarch.standby import wait_for_promotion
from sky_monarch.training.environment import RankEnvironment
from tests.support.waiting import eventually
from tests.unit.test_worker import LIMIT_S, REPO, Standby, run_directly

IMPORTS_S = 120  # torch, on machines that do other things too
HOT = ["--until=session"]
AHEAD = "import os, sys, time, pathlib\nfrom sky_monarch.standby import wait_for_promotion\n"


def hot(folder: Path, body: str, *words: str, flags: tuple[str, ...] = (), preload: str = "") -> Standby:
    (folder / "case.py").write_text(AHEAD + body)
    os.environ["TORCHFT_LIGHTHOUSE"], os.environ["GENERATION"] = "http://r0.g0.secret@127.0.0.1:1", "0"
    try:
        return Standby([*flags, "case.py", *words], folder, preload=preload, options=HOT)
    finally:
        del os.environ["TORCHFT_LIGHTHOUSE"], os.environ["GENERATION"]


def read_words(standby: Standby, *words: str) -> None:
    """The standby says these words, and nothing else yet."""
    wanted = "".join(f"{word}\n" for word in words).encode()
    said = b""
    while len(said) < len(wanted):
        part = standby.agent.recv(len(wanted) - len(said))
        assert part, (said, standby.finish())
        said += part
    assert said == wanted


def promote(standby: Standby, **env: str) -> subprocess.CompletedProcess[str]:
    standby.agent.sendall(json.dumps({"env": env}).encode() + b"\n")
    return standby.finish()


def test_outside_of_a_standby_there_is_nothing_to_wait_for() -> None:
    assert wait_for_promotion() is False


def test_the_script_runs_ahead_and_learns_who_it_is_when_it_is_needed(tmp_path: Path) -> None:
    standby = hot(
        tmp_path,
        "pathlib.Path('ahead').write_text(os.environ['GENERATION'])\n"
        "print('TORCHFT_LIGHTHOUSE' in os.environ, wait_for_promotion(), os.environ['GENERATION'])\n"
        "print(os.environ['TORCHFT_LIGHTHOUSE'], wait_for_promotion(), sys.argv, os.path.exists('/dev/fd/3'))\n",
        "--steps",
        "3",
    )
    read_words(standby, "ready")
    assert (tmp_path / "ahead").read_text() == "0"
    done = promote(standby, GENERATION="7", TORCHFT_LIGHTHOUSE="http://r0.g7.secret@127.0.0.1:1")
    assert done.stdout == (
        "False True 7\nhttp://r0.g7.secret@127.0.0.1:1 False ['case.py', '--steps', '3'] False\n"
    )
    assert (done.stderr, done.returncode) == ("", 0)


def test_after_the_promotion_it_ends_as_it_ends_when_python_runs_it(tmp_path: Path) -> None:
    for body in ("def f():\n    raise ValueError('boom')\nf()", "sys.exit('why')", "raise KeyboardInterrupt"):
        standby = hot(tmp_path, f"wait_for_promotion()\n{body}")
        direct = run_directly(["case.py"], tmp_path)
        read_words(standby, "ready")
        done = promote(standby)
        assert (done.stdout, done.stderr, done.returncode) == (
            direct.stdout,
            direct.stderr,
            direct.returncode,
        )


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "sys.exit(3)", "raise ValueError('ahead')"])
def test_a_script_that_does_not_get_there_begins_again_as_a_warm_standby(tmp_path: Path, end: str) -> None:
    (tmp_path / "sibling.py").write_text("")
    standby = hot(
        tmp_path,
        "assert not sys.flags.debug and sys.flags.optimize == 1\n"
        "pathlib.Path('pids').open('a').write(f'{os.getpid()} ')\n"
        "if os.environ['GENERATION'] == '0':\n"
        "    os.environ['LEFT'] = 'over'\n    os.chdir('/')\n"
        f"    {end}\n"
        "else:\n    print(os.environ.get('LEFT'), os.getcwd(), 'sibling' in sys.modules)\n",
        flags=("-O",),
        preload="sibling",
    )
    read_words(standby, "early", "ready")
    done = promote(standby, GENERATION="7")
    assert (done.stdout, done.returncode) == (f"None {tmp_path} True\n", 0)
    assert "the script ended before it entered a session" in done.stderr
    assert (tmp_path / "pids").read_text().split() == [str(standby.process.pid)] * 2


def test_what_it_had_started_and_registered_is_over_when_it_begins_again(tmp_path: Path) -> None:
    standby = hot(
        tmp_path,
        "import atexit, multiprocessing, time\n"
        "if __name__ == '__main__' and os.environ['GENERATION'] == '0':\n"
        "    atexit.register(lambda: pathlib.Path('bye').touch())\n"
        "    child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,), daemon=True)\n"
        "    child.start()\n    pathlib.Path('child').write_text(str(child.pid))\n",
    )
    read_words(standby, "early", "ready")
    assert (tmp_path / "bye").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "child").read_text()), 0)
    assert promote(standby, GENERATION="7").returncode == 0


def test_promoted_on_its_way_it_goes_on_from_where_it_is(tmp_path: Path) -> None:
    standby = hot(
        tmp_path,
        "pathlib.Path('runs').open('a').write('x')\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.01)\n"
        "wait_for_promotion(); print(os.environ['GENERATION'])\n",
    )
    standby.agent.sendall(b'{"env": {"GENERATION": "7"}}\n')
    standby.agent.close()  # as the agent does
    (tmp_path / "go").touch()
    out, err = standby.process.communicate(timeout=LIMIT_S)
    assert (out, err, standby.process.returncode) == ("7\n", "", 0)
    assert (tmp_path / "runs").read_text() == "x"


def test_promoted_on_its_way_to_a_crash_it_crashes_as_the_rank(tmp_path: Path) -> None:
    standby = hot(
        tmp_path,
        "while not pathlib.Path('go').exists(): time.sleep(0.01)\nraise SystemExit(int(os.environ['GENERATION']))",
    )
    standby.agent.sendall(b'{"env": {"GENERATION": "7"}}\n')
    standby.agent.close()
    (tmp_path / "go").touch()
    standby.process.communicate(timeout=LIMIT_S)
    assert standby.process.returncode == 7, "the promotion was not lost, and 0 would have been taken for done"


def test_a_hot_standby_that_nobody_needs_cleans_up_and_leaves(tmp_path: Path) -> None:
    standby = hot(
        tmp_path,
        "import atexit; atexit.register(lambda: pathlib.Path('bye').touch())\n"
        "wait_for_promotion()\npathlib.Path('trained').touch()\n",
    )
    read_words(standby, "ready")
    standby.agent.close()
    out, err = standby.process.communicate(timeout=LIMIT_S)
    assert (out, err, standby.process.returncode) == ("", "", 0)
    assert (tmp_path / "bye").exists()
    assert not (tmp_path / "trained").exists()


def test_a_malformed_promotion_trains_nothing_and_shows_no_content(tmp_path: Path) -> None:
    standby = hot(tmp_path, "wait_for_promotion()\nprint('trained')\n")
    read_words(standby, "ready")
    standby.agent.sendall(b"nonsense\n")
    done = standby.finish()
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr.startswith("error: worker: the promotion is malformed")
    assert "nonsense" not in done.stderr


def test_interrupts_end_it_without_a_word_before_and_as_ever_after(tmp_path: Path) -> None:
    body = "wait_for_promotion()\npathlib.Path('up').touch()\ntime.sleep(60)\n"
    standby = hot(tmp_path, body)
    read_words(standby, "ready")
    standby.process.send_signal(signal.SIGINT)
    done = standby.finish()
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")

    standby = hot(tmp_path, body)
    read_words(standby, "ready")
    standby.agent.sendall(b'{"env": {}}\n')
    eventually(lambda: (tmp_path / "up").exists(), within_s=LIMIT_S)
    standby.process.send_signal(signal.SIGINT)
    assert standby.finish().stderr.endswith("KeyboardInterrupt\n")


def test_a_child_of_a_standby_cannot_take_its_place(tmp_path: Path) -> None:
    standby = hot(
        tmp_path,
        "if os.fork() == 0:\n"
        "    try: wait_for_promotion()\n"
        "    except Exception as error: pathlib.Path('said').write_text(type(error).__name__)\n"
        "    os._exit(0)\n"
        "os.wait(); wait_for_promotion()\n",
    )
    read_words(standby, "ready")
    assert (tmp_path / "said").read_text() == "ConfigError"
    assert promote(standby).returncode == 0


def test_whoever_has_an_agent_and_no_generation_cannot_enter_a_session() -> None:
    known = {"SKY_MONARCH_AGENT": "unix:/x", "SKY_MONARCH_TOKEN": "t", "SKY_MONARCH_RUN_ID": "r"}
    place = {"SKY_MONARCH_REPLICA": "0", "SKY_MONARCH_REPLICAS": "2"}
    nobody = RankEnvironment.read({**known, **place, "SKY_MONARCH_GENERATION": "0"})
    with pytest.raises(ConfigError, match="started by a standby"):
        nobody.check_identity()
    somebody = RankEnvironment.read(
        {**known, **place, "SKY_MONARCH_GENERATION": "1", "TORCHFT_LIGHTHOUSE": "http://h:1"}
    )
    somebody.check_identity()
    RankEnvironment.read({}).check_identity()
    with pytest.raises(ConfigError, match="TORCHFT_LIGHTHOUSE is not set"):
        RankEnvironment.read({**known, **place, "SKY_MONARCH_GENERATION": "1"})


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(2 * IMPORTS_S)
def test_what_a_session_does_on_standby_changes_nothing_of_the_training(tmp_path: Path) -> None:
    """Warming up draws no random number, and nothing of the user's is touched."""
    script = [str(REPO / "examples/train.py"), "--steps", "3"]
    standby = Standby(script, tmp_path, preload="sky_monarch.training.session", options=HOT)
    standby.agent.settimeout(IMPORTS_S)
    direct = run_directly(script, tmp_path, limit_s=IMPORTS_S)
    read_words(standby, "ready")
    threads = {
        thread.joinpath("comm").read_text().strip()
        for thread in Path(f"/proc/{standby.process.pid}/task").iterdir()
    }
    done = promote(standby)
    assert done.returncode == 0, done.stderr
    assert "could not warm up" not in done.stderr
    assert re.findall(r"step 3 digest \w{64}", done.stdout) == re.findall(
        r"step 3 digest \w{64}", direct.stdout
    )
    assert len(re.findall(r"digest", done.stdout)) == 1
    assert not {name for name in threads if "quorum" in name}, "it has no Manager yet"
