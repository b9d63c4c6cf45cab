"""What the real SDK of SkyPilot asks an API server, and what we make of its answers. Skipped where it is not installed.

The server is a stand-in that keeps what it was asked; the requests that it answers with are SkyPilot's own objects. See
`test_skypilot_tasks.py` for an environment with SkyPilot.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.test_skypilot_tasks import PYTHON, ROOT
from tests.unit.test_skypilot_tasks import pytestmark as needs_skypilot

pytestmark = needs_skypilot

SCRIPT = """
import json, os, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

asked, answers, dead = [], {}, threading.Event()

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def parse_request(self):
        return not dead.is_set() and super().parse_request()  # hangs up on whoever is still connected
    def reply(self, code, value, request_id=None):
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-SkyPilot-API-Version", str(constants.API_VERSION))
        self.send_header("X-SkyPilot-Version", sky.__version__)
        if request_id:
            self.send_header("X-Skypilot-Request-ID", request_id)
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        url = urlsplit(self.path)
        query = {key: values for key, values in parse_qs(url.query).items()}
        if url.path == "/api/health":
            health = {"status": "healthy", "api_version": str(constants.API_VERSION), "version": sky.__version__}
            return self.reply(200, {**health, "version_on_disk": sky.__version__, "commit": sky.__commit__})
        asked.append([url.path, query])
        if url.path == "/api/status":
            given = query.get("request_ids") or list(answers)
            return self.reply(200, [encoded(answers[one]) for one in given if one in answers])
        if url.path == "/api/get":
            request = answers[query["request_id"][0]]
            failed = request.get_error() is not None
            payload = encoded(request)
            return self.reply(500 if failed else 200, {"detail": payload} if failed else payload)
        if url.path == "/api/stream":
            return self.reply(200, {})
        self.reply(404, {"detail": url.path})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "null")
        path = urlsplit(self.path).path
        asked.append([path, body])
        self.reply(200, {}, "request-" + path.strip("/").replace("/", "-"))

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
os.environ["SKYPILOT_API_SERVER_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
import sky
from sky import backends, exceptions
from sky.schemas.api import responses
from sky.server import constants
from sky.server.requests import payloads
from sky.server.requests import requests as kept
from sky.utils import status_lib
from sky_monarch.launch import skypilot
from sky_monarch.provision import skypilot as provider
threading.Thread(target=server.serve_forever, daemon=True).start()

def request(name, cluster, *, error=None, value=None, status="SUCCEEDED", at=1000.0):
    one = kept.Request(
        request_id="x", name=name, entrypoint=print, request_body=payloads.RequestBody(),
        status=kept.RequestStatus(status), created_at=at, user_id="u", cluster_name=cluster,
    )
    if error is not None:
        one.set_error(error)
    elif status == "SUCCEEDED":
        one.set_return_value(value)
    return one

def encoded(one):
    return json.loads(one.encode().model_dump_json())

def attempt(work):
    try:
        return {"value": work()}
    except skypilot.SkyPilotError as error:
        said = provider._translated(error)
        return {"kind": said.kind, "reason": str(said), "away": error.is_away, "forgotten": error.is_forgotten}

task = json.loads(sys.stdin.read())
out = {"ensure": [attempt(skypilot.ensure_server)]}
out["launch"] = attempt(lambda: skypilot.launch(task, "demo-h0"))
out["bad task"] = attempt(lambda: skypilot.launch({**task, "resources": {"colour": "red"}}, "demo-h0"))
out["status"] = [attempt(lambda: skypilot.status(["demo-h0"], refresh=way)) for way in (True, False)]
out["down"] = attempt(lambda: skypilot.down("demo-h0"))
out["cancel"] = attempt(lambda: skypilot.cancel("request-launch"))
posts = [entry for entry in asked if isinstance(entry[1], dict) and "env_vars" in entry[1]]

full = exceptions.ResourcesUnavailableError("Failed").with_failover_history(
    [Exception("Out of host capacity."), Exception("Quota exceeded")])
answers.update({
    "running": request("sky.launch", "demo-h0", status="RUNNING", at=2000.0),
    "older": request("sky.launch", "demo-h0", status="FAILED", error=full, at=1000.0),
    "full": request("sky.launch", "demo-h1", status="FAILED", error=full, at=3000.0),
    "exec": request("sky.exec", "demo-h0", at=4000.0),
    "nobody": request("sky.launch", "demo-h2", status="FAILED", error=exceptions.NoCloudAccessError("no cloud")),
    "cancelled": request("sky.launch", "demo-h3", status="CANCELLED"),
    "gone": request("sky.down", "demo-h4", status="FAILED", error=exceptions.ClusterDoesNotExist("no demo-h4")),
    "none": request("sky.status", None, value=[]),
})
out["done"] = {name: attempt(lambda: skypilot.is_done(name)) for name in ("running", "full", "cancelled", "lost")}
out["find"] = [attempt(lambda: skypilot.find_launch("demo-h0", since)) for since in (0, 1_500_000, 2_500_000)]
ended = {"name": "demo-old", "status": None, "resources": sky.Resources(infra="oci")}
report = request("sky.cost_report", None)
report.set_return_value([ended])
answers["request-cost_report"] = report
out["knew"] = [attempt(lambda: skypilot.knew(name)) for name in ("demo-h0", "demo-old", "demo-never")]
out["results"] = {name: attempt(lambda: skypilot.launched(name)) for name in ("full", "nobody", "cancelled")}
out["gone"] = attempt(lambda: skypilot.result("gone"))
out["none"] = attempt(lambda: skypilot.clusters("none"))
head = backends.CloudVmRayResourceHandle(
    cluster_name="demo-head", cluster_name_on_cloud="demo-head-1", cluster_yaml=None, launched_nodes=1,
    launched_resources=sky.Resources(infra="oci"), stable_ssh_ports=[2222],
    stable_internal_external_ips=[("10.0.0.1", "192.0.2.7")],
)
answers["request-status"] = request("sky.status", None, value=[responses.StatusResponse(
    name="demo-head", launched_at=1, handle=head, status=status_lib.ClusterStatus.UP, autostop=10, to_down=True,
    cluster_hash="h", cluster_ever_up=True, user_hash="u", user_name="n", workspace="default", is_managed=False,
    nodes=1, credentials={"ssh_user": "sky", "ssh_private_key_content": "KEY", "ssh_private_key": "~/.ssh/none"},
)])
out["ssh"] = [attempt(lambda: skypilot.ssh(name)) for name in ("demo-head", "demo-gone")]
out["ssh config"] = open(out["ssh"][0]["value"][1]).read() if "value" in out["ssh"][0] else None
dead.set()
server.shutdown()
server.server_close()
out["away"] = [attempt(lambda: skypilot.is_done("running")), attempt(lambda: skypilot.launch(task, "demo-h0"))]
out["ensure"].append(attempt(skypilot.ensure_server))
print("SAID " + json.dumps([out, posts, asked]))
"""

TASK = {
    "name": "demo-h0",
    "num_nodes": 1,
    "resources": {"infra": "slurm/loop", "autostop": {"idle_minutes": 5, "down": True}},
    "setup": "bash host.sh setup\n",
    "run": "exec bash host.sh run\n",
    "envs": {"SKY_MONARCH_HOST": '{"host": "demo-h0"}'},
    "secrets": {"SKY_MONARCH_ENROLMENT": "c2VjcmV0"},
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What came of each call, the bodies of what was posted, and everything that was asked."""
    home = tmp_path_factory.mktemp("home")
    env = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
    done = subprocess.run(
        [str(PYTHON), "-c", SCRIPT],
        input=json.dumps(TASK),
        env={**env, "HOME": str(home), "PYTHONPATH": str(ROOT), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("SAID "))
    assert not list(Path(home).rglob("server.log")), "no API server was started"
    return json.loads(line.removeprefix("SAID "))


def test_a_launch_carries_the_task_with_its_autodown_and_its_secret(said):
    out, posts, _ = said
    assert out["launch"] == {"value": "request-launch"}
    (body,) = [body for path, body in posts if path == "/launch"]

    assert body["cluster_name"] == "demo-h0"
    assert not body["retry_until_up"], "whether it is tried again is ours to say"
    assert "autostop:" in body["task"]
    assert "idle_minutes: 5" in body["task"]
    assert "down: true" in body["task"]
    assert "SKY_MONARCH_ENROLMENT: c2VjcmV0" in body["task"]
    assert "c2VjcmV0" not in json.dumps({key: value for key, value in body.items() if key != "task"})


def test_how_a_cluster_is_reached_by_ssh_is_what_skypilots_own_commands_write(said):
    out, _, _ = said
    (found, missing), config = out["ssh"], out["ssh config"]

    first, _, option, key, last = found["value"]
    assert (first, option, last) == ("-F", "-i", "demo-head")
    assert "KEY" in Path(key).read_text(), "also where $HOME is not what the account says, which ssh goes by"
    assert "Host demo-head\n  HostName 192.0.2.7\n  User sky\n" in config
    assert "  Port 2222\n" in config
    assert "demo-gone" in missing["reason"]
    assert not missing["away"]


def test_a_status_is_asked_of_the_clouds_or_of_skypilots_notes_alone(said):
    out, posts, _ = said
    assert out["status"] == [{"value": "request-status"}] * 2
    bodies = [body for path, body in posts if path == "/status"]

    assert [body["refresh"] for body in bodies] == ["FORCE", "NONE"]
    assert all(body["cluster_names"] == ["demo-h0"] for body in bodies)


def test_a_cluster_is_ended_and_a_request_cancelled_by_name(said):
    out, posts, _ = said
    assert out["down"] == {"value": "request-down"}
    assert out["cancel"] == {"value": None}

    (down,) = [body for path, body in posts if path == "/down"]
    assert (down["cluster_name"], down["purge"]) == ("demo-h0", False)
    (cancel,) = [body for path, body in posts if path == "/api/cancel"]
    assert cancel["request_ids"] == ["request-launch"]


def test_a_task_that_skypilot_does_not_take_is_refused(said):
    assert said[0]["bad task"]["kind"] == "refused"
    assert "colour" in said[0]["bad task"]["reason"]


def test_a_request_is_done_or_under_way_or_not_known(said):
    done = said[0]["done"]
    assert [done[name] for name in ("running", "full", "cancelled")] == [
        {"value": False},
        {"value": True},
        {"value": True},
    ]
    assert (done["lost"]["forgotten"], done["lost"]["away"]) == (True, False)


def test_the_newest_launch_of_a_cluster_is_found_since_a_moment(said):
    out, _, asked = said
    assert out["find"] == [{"value": "x"}, {"value": "x"}, {"value": None}]
    listed = [query for path, query in asked if path == "/api/status" and "cluster_name" in query]
    assert all("request_body" not in query["fields"] for query in listed), (
        "tasks and secrets are not asked for"
    )


def test_a_server_remembers_a_cluster_by_its_launch_or_by_its_history(said):
    assert said[0]["knew"] == [{"value": True}, {"value": True}, {"value": False}]


def test_what_a_launch_ended_with_is_understood(said):
    results = said[0]["results"]
    assert (results["full"]["kind"], results["full"]["reason"]) == (
        "capacity",
        "Out of host capacity.; Quota exceeded",
    )
    assert results["nobody"]["kind"] == "credentials"
    assert results["cancelled"]["kind"] == "error"
    assert said[0]["gone"]["reason"] == "no demo-h4"
    assert said[0]["none"] == {"value": []}


def test_a_server_that_is_away_is_none_that_has_forgotten_and_none_is_started(said):
    assert said[0]["ensure"][0] == {"value": None}
    assert "Unable to start local API server" in said[0]["ensure"][1]["reason"], (
        "one elsewhere is not replaced"
    )
    for answer in said[0]["away"]:
        assert answer["kind"] == "error"
        assert (answer["away"], answer["forgotten"]) == (True, False)
