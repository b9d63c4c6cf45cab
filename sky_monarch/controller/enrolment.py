"""What a launcher is told: which hosts are wanted, and what the agent of each is to know.

Each attempt at a host gets a certificate of its own. It is made when it is asked for, and kept nowhere: neither the
journal nor a log ever holds one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, Protocol

from sky_monarch.config.examination import Need, examination, needs_of
from sky_monarch.controller.hosts import Host, certificate_name, is_wanted
from sky_monarch.controller.model import HostPhase, State
from sky_monarch.controller.settings import Settings
from sky_monarch.launch.tunnel import tunnel_address

__all__ = ["Enrolments", "Issuer"]

_LINGER_S = 600.0
_COMING = frozenset({HostPhase.WANTED, HostPhase.LAUNCHING})


class Issuer(Protocol):
    """What this module needs of ``sky_monarch.actors.authority``."""

    def issue(self, name: str) -> Mapping[str, str]:
        """A certificate for that name, with its key. Secret."""
        ...


class Enrolments:
    """Says what is wanted.

    Args:
        settings: What the controller was told.
        issuer: The authority of the run; None where agents dial a unix socket and prove nothing.
    """

    def __init__(self, settings: Settings, issuer: Issuer | None) -> None:
        self._settings = settings
        self._issuer = issuer

    def document(self, state: State) -> dict[str, Any]:
        """The answer to ``GET /v1/hosts/wanted``. It holds secrets."""
        # Of a host whose attempts were forgotten nothing is wanted yet: a launcher would end what lives there.
        listed = (host for host in state.hosts if host.provisioned)
        known = (host for host in listed if host.attempt or not is_wanted(state, host))
        needs = needs_of(self._settings.job, {host.name: host.replicas for host in state.hosts})
        hosts = [self._host(state, host, needs.get(host.name)) for host in known]
        return {
            "version": state.wanted,
            "placement": state.placement,
            "controller": self._settings.reached_at,
            "hosts": hosts,
            "ended": state.phase.ended,
        }

    def _host(self, state: State, host: Host, need: Need | None) -> dict[str, Any]:
        wanted = is_wanted(state, host)
        # Whoever is up has his; a launcher that was started anew may have to launch what it was at.
        coming = wanted and host.phase in _COMING
        return {
            "host": host.name,
            "attempt": host.attempt,
            "want": "up" if wanted else "down",
            "reason": host.reason or ("the run needs it" if wanted else state.reason),
            "groups": list(host.replicas),
            "replaces": host.replaces,
            "doubted": host.doubted,
            "agent": self.agent(host, need),
            "enrolment": self._enrolment(host) if coming else None,
        }

    def agent(self, host: Host, need: Need | None = None) -> dict[str, Any]:
        """``agent.json`` of a host, without what only the host knows. No secret.

        Args:
            host: Whose.
            need: The accelerators that its groups need.
        """
        # What was exported where the run was launched is only good for hosts that are that very machine.
        is_far = not self._settings.base_env
        place = certificate_name(host.name, host.attempt)
        relay = self._settings.relay
        apart = {} if relay is None else {"relay": relay, "address": tunnel_address(host.name)}
        return {
            "run_id": self._settings.run_id,
            "host": host.name,
            "attempt": host.attempt,
            "version": self._settings.version,
            "controller": self._settings.reached_at,
            "address": "auto",
            "workdir": "." if is_far else None,
            "inherit_env": True,
            "services": [],
            "doctor": examination(
                self._settings.job,
                place=place,
                held=True,
                need=need,
            ),
            "linger_s": _LINGER_S,
            **apart,
        }

    def _enrolment(self, host: Host) -> str:
        name = certificate_name(host.name, host.attempt)
        identities = {} if self._issuer is None else {"agent": dict(self._issuer.issue(name))}
        secret = {"token": self._settings.token, "identities": identities}
        return base64.b64encode(json.dumps(secret, separators=(",", ":")).encode()).decode()
