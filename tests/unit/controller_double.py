"""A stand-in for agent and controller of one run: serves the contract's API from files that a test writes.

``python controller_double.py STATE NAME`` makes the run folder, prints the run id once it serves, and goes on
until ``down`` or a signal. In the run folder: ``status.json`` (merged into RunStatus), ``events.ndjson``,
``logs.ndjson`` and ``raw.bin`` are what the API answers with; while ``silent`` exists it hangs up on requests.
"""

import json
import os
import socketserver
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from sky_monarch.launch.folder import RunFolder, new_run_id, write_json
from sky_monarch.launch.local import finish
from sky_monarch.launch.process import start_ticks

TOKEN = "5ecret" * 8


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    run_dir: Path

    def log_message(self, *_):
        pass

    def address_string(self):
        return "unix"

    def _json(self, code, value):
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _allowed(self):
        if (self.run_dir / "silent").exists():
            self.close_connection = True
            return False
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._json(401, {"error": {"kind": "unauthorized", "message": "no token", "hint": None}})
            return False
        return True

    def _status(self):
        extra = json.loads((self.run_dir / "status.json").read_text())
        return {
            "run_id": self.run_dir.name,
            "name": RunFolder(self.run_dir).name,
            "state": "RUNNING",
            **extra,
        }

    def _stream(self, file, keep, follow):
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent = 0
        while True:
            over = (self.run_dir / "final.json").exists()
            lines = [
                line for line in (self.run_dir / file).read_bytes().splitlines() if keep(json.loads(line))
            ]
            for line in lines[sent:]:
                self.wfile.write(b"%x\r\n%s\n\r\n" % (len(line) + 1, line))
            sent = len(lines)
            if (self.run_dir / "hangup").exists():  # in mid-stream, without the end that HTTP wants
                (self.run_dir / "hangup").unlink()
                self.close_connection = True
                return
            if over or not follow:
                break
            time.sleep(0.02)
        self.wfile.write(b"0\r\n\r\n")

    def do_GET(self):
        if not self._allowed():
            return
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        follow = query.get("follow") == "1"
        if url.path == "/v1/status":
            self._json(200, self._status())
        elif url.path == "/v1/events":
            after = int(query.get("after", 0))
            self._stream("events.ndjson", lambda event: event["id"] > after, follow)
        elif url.path == "/v1/logs":
            wanted = {
                key: int(query[key])
                for key in ("replica", "rank", "generation")
                if query.get(key, "").isdigit()
            }
            self._stream(
                "logs.ndjson", lambda line: all(line[key] == value for key, value in wanted.items()), follow
            )
        elif url.path == "/v1/logs/raw":
            body = (self.run_dir / "raw.bin").read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        else:
            self._json(404, {"error": {"kind": "not_found", "message": "no such route", "hint": None}})

    def do_POST(self):
        if not self._allowed():
            return
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        finish(RunFolder(self.run_dir), state="CANCELLED", reason=order["reason"], exit_code=8)
        self._json(202, {"state": "STOPPING"})
        self.wfile.flush()
        time.sleep(0.1)
        os._exit(0)


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def main():
    state, name = Path(sys.argv[1]), sys.argv[2]
    run_id = new_run_id(name)
    run_dir = state / "runs" / run_id
    run_dir.mkdir(parents=True, mode=0o700)
    sockets = {who: str(run_dir / f"{who}.sock") for who in ("api", "controller", "agent", "lighthouse")}
    created_ms = time.time_ns() // 1_000_000
    run = {"run_id": run_id, "name": name, "infra": "local", "created_ms": created_ms, "sockets": sockets}
    write_json(run_dir / "run.json", {**run, "launcher_pid": os.getppid(), "version": "0"})
    write_json(run_dir / "job.json", {"name": name, "replicas": 2, "ranks_per_replica": 1})
    write_json(run_dir / "private.json", {"token": TOKEN, "base_env": {}, "envs": {}, "secrets": {}})
    (run_dir / "status.json").write_text("{}")
    for empty in ("events.ndjson", "logs.ndjson", "raw.bin"):
        (run_dir / empty).touch()
    Handler.run_dir = run_dir
    with Server(sockets["api"], Handler) as server:
        write_json(run_dir / "agent.pid", {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())})
        print(run_id, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
