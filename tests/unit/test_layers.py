"""The arrows of the layers point down only, checked in the source of every module."""

import ast
from pathlib import Path

import pytest

import sky_monarch

ROOT = Path(sky_monarch.__file__).parent

#: Which of our own parts each part may import. `errors` may be imported by all and imports nothing.
ALLOWED = {
    "errors": set(),
    "gpus": set(),
    "config": {"gpus"},
    "launch": {"config", "gpus"},
    # The launcher of a head that is a cluster keeps itself, as an agent does.
    "provision": {"launch", "config", "keeper", "service_log"},
    # Who launches beyond this machine makes the run's certificates; who launches on it looks at what it has.
    "sdk": {"launch", "config", "actors", "doctor"},
    # The hidden commands only hand their arguments on to the process modules.
    "cli": {
        *("sdk", "config", "launch", "doctor", "gpus", "tracebacks"),
        *("actor_host", "agent", "controller", "lighthouse"),
    },
    "controller": {"launch", "config", "gpus", "service_log", "tracebacks", "actors", "_core"},
    "actors": {"_core", "stacks"},
    "actor": {"actors"},
    "actor_host": {"actors"},
    "rdma": {"actors"},
    "agent": {"_core", "keeper", "enrolment", "head", "notice"},
    "doctor": {"_core", "gpus"},
    "enrolment": set(),
    "head": {"enrolment", "launch"},
    "keeper": set(),
    "notice": set(),
    "service_log": set(),
    "lighthouse": {"_core"},
    "relay": {"_core"},
    "stacks": set(),
    "standby": {"stacks"},
    "tracebacks": set(),
    "fork_server": {"_core"},
    "training": {"actors", "config", "gpus", "stacks", "standby"},
    "worker": {"training", "actors", "config", "standby", "fork_server"},
    "__init__": {"sdk", "config"},
    "__main__": {"cli"},
}

#: Who may import what is heavy or unsafe, and where it must not be at module level.
#: Of the actors' modules those that run in ranks, or hold tensors; each imports torch when it is used.
WITH_TORCH = (
    "actors.elastic",
    "actors.process_group",
    "actors.sharded",
    "actors.tensor_bytes",
    "actors.tensors",
)
OUTSIDE = {
    "sky": lambda module: module == "launch.skypilot",
    "torch": lambda module: module.split(".")[0] in ("training", "worker") or module in WITH_TORCH,
    "torchft": lambda module: module.split(".")[0] in ("training", "worker", "lighthouse"),
}
LAZY_IN_CLI = {"sky", "torch", "torchft", "httpx", "pydantic", "rich"}
REACHED_BY_CLI = ("cli", "sdk", "launch", "__init__", "__main__")
#: A provisioner of local hosts never needs what SkyPilot's does; none is reached by a command.
LAZY_TOO = ("provision",)


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        yield name, ast.parse(path.read_text(), str(path))


def imports(tree):
    """``(dotted name, at module level, for types only)`` of every import."""
    found = []

    def visit(node, top, typing):
        for child in ast.iter_child_nodes(node):
            inner_typing = typing or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            inner_top = top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.Import):
                found.extend((alias.name, top, typing) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, "imports are absolute"
                found.extend((f"{child.module}.{alias.name}", top, typing) for alias in child.names)
            visit(child, inner_top, inner_typing)

    visit(tree, True, False)
    return found


def violations(name, tree):
    part = name.split(".")[0]
    for imported, top, typing in imports(tree):
        first, *rest = imported.split(".")
        if first == "sky_monarch":
            target = rest[0] if rest else "__init__"
            own = target in (part, "errors", "__version__", "__init__")
            if not own and target not in ALLOWED.get(part, set()):
                yield f"{name} imports {imported}: {part} may import {sorted(ALLOWED.get(part, set()))}"
            continue
        if first in OUTSIDE and not OUTSIDE[first](name):
            yield f"{name} imports {first}"
        if top and not typing and first in LAZY_IN_CLI and part in (*REACHED_BY_CLI, *LAZY_TOO, "actors"):
            yield f"{name} imports {first} at module level"


@pytest.mark.parametrize(("name", "tree"), [pytest.param(*module, id=module[0]) for module in modules()])
def test_a_module_imports_only_what_lies_below_it(name, tree):
    assert list(violations(name, tree)) == []


def test_every_part_has_its_place_in_the_layers():
    unknown = {name.split(".")[0] for name, _ in modules()} - set(ALLOWED)
    assert not unknown, "give it a place in ALLOWED, and in the design"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("launch.plan", "from sky_monarch.sdk import Run"),
        ("cli.up", "import httpx"),
        ("cli.up", "def f():\n    import torch"),
        ("sdk.run", "from sky_monarch import controller"),
        ("config.spec", "from sky_monarch._core import x"),
        ("launch.local", "import sky.clouds"),
        ("errors", "import sky_monarch.config"),
        ("provision.host", "import sky"),
        ("provision.client", "import httpx"),
        ("provision.host", "from sky_monarch.controller import model"),
        ("sdk.run", "from sky_monarch.provision import provider"),
        ("cli.up", "def f():\n    from sky_monarch.provision.local import LocalProvider"),
        ("controller.policy", "from sky_monarch.provision import provider"),
        ("launch.local", "from sky_monarch.provision import provider"),
        ("sdk.run", "class A:\n    from pydantic import BaseModel"),
        ("actors.tensors", "import torch"),
        ("actors.endpoint", "def f():\n    import torch"),
    ],
)
def test_the_check_itself_sees_each_kind_of_violation(name, source):
    assert list(violations(name, ast.parse(source)))
