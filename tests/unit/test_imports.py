"""What imports cost, and what they may not touch."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sky_monarch
from sky_monarch import cli

HEAVY = {"sky", "torch", "torchft", "httpx", "pydantic", "numpy", "rich", "ruamel", "starlette", "uvicorn"}


def child(code, *arguments, **options):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_after(code):
    out = child(f"import sys, json\n{code}\nprint(); print(json.dumps(sorted(sys.modules)))")
    return set(json.loads(out.splitlines()[-1]))


def help_of(*words):
    return (
        "from sky_monarch.cli import app\n"
        f"try: app({list(words)!r})\nexcept SystemExit as leaving: assert leaving.code == 0"
    )


@pytest.mark.parametrize("words", [["--help"], ["up", "--help"], ["status", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(words):
    loaded = modules_after(help_of(*words))
    assert not HEAVY & loaded
    assert not {name for name in loaded if name.startswith(("sky_monarch.sdk", "sky_monarch.config.spec"))}
    assert "sky_monarch._core" not in loaded


def test_importing_the_package_loads_nothing_of_it():
    loaded = modules_after("import sky_monarch")
    assert {name for name in loaded if name.startswith("sky_monarch.")} == set()
    assert not HEAVY & loaded


@pytest.mark.parametrize(
    "package", ["sky_monarch.sdk", "sky_monarch.sdk.aio", "sky_monarch.launch.local", "sky_monarch.cli"]
)
def test_launchers_import_where_the_compiled_core_is_absent(package):
    hide = (
        "import sys\nclass Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'torchft', 'sky') or name == 'sky_monarch._core':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    loaded = modules_after(f"{hide}import {package}")
    assert not {"httpx", "pydantic"} & loaded, "what the CLI reaches imports them when they are used"


def test_every_public_name_is_sorted_importable_and_at_home():
    assert sky_monarch.__all__ == sorted(sky_monarch.__all__)
    for name in sky_monarch.__all__:
        assert getattr(sky_monarch, name) is not None
        assert name in dir(sky_monarch)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sky_monarch.nothing  # noqa: B018


def test_the_version_is_the_one_of_the_distribution():
    text = Path(sky_monarch.__file__).parents[1].joinpath("pyproject.toml").read_text()
    assert f'version = "{sky_monarch.__version__}"' in text


def test_each_command_has_a_module_and_a_help_text():
    commands = {command.name: command for command in cli.app.registered_commands}
    assert {"up", "status", "logs", "events", "down", "validate", "init", "attach"} < set(commands)
    assert {name for name, command in commands.items() if command.hidden} == {
        "agent",
        "controller",
        "lighthouse",
    }
    for name, command in commands.items():
        assert command.callback.__doc__
        if not command.hidden:
            assert importlib.import_module(f"sky_monarch.cli.{name.replace('-', '_')}")


def test_importing_the_package_costs_at_most_30_ms_of_cpu():
    code = "import time; a = time.process_time(); import sky_monarch; print(time.process_time() - a)"
    assert min(float(child(code)) for _ in range(5)) <= 0.030


def test_what_asks_a_controller_leaves_rich_alone_and_whoever_has_httpx_has_it_whole():
    asked = modules_after("from sky_monarch.sdk._http import load_httpx\nload_httpx().Client")
    assert "rich" not in asked
    assert "httpx._main" not in asked
    child(
        "import httpx\nfrom sky_monarch.sdk._http import load_httpx\nassert load_httpx().main is httpx.main"
    )


@pytest.mark.parametrize(
    "words",
    [["status"], ["logs", "nosuch", "--replica", "1", "--tail", "5"], ["events", "nosuch", "--after", "3"]],
)
def test_what_is_asked_often_checks_its_parameters_without_pydantic(words, tmp_path, monkeypatch):
    monkeypatch.setenv("SKY_MONARCH_STATE_DIR", str(tmp_path))
    run = f"from sky_monarch.cli import app\ntry: app({words!r})\nexcept SystemExit: pass"

    assert not HEAVY & modules_after(run)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replica", "-1"], "greater than or equal to 0"),
        (["--replica", "two"], "valid integer"),
        (["--tail", "1.5"], "valid integer"),
        (["--generation", "0"], "greater than or equal to 1"),
    ],
)
def test_what_is_no_plain_number_is_refused_in_typers_words(words, said):
    done = CliRunner().invoke(cli.app, ["logs", "nosuch", *words])
    assert done.exit_code == 2
    assert said in done.output
