"""The certificate authority of a run: who shows no certificate of it is refused on every TLS port of the run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sky_monarch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """Issues the certificates of one run. It is a secret: it lives in the head's ``private.json`` and nowhere else.

    Attributes:
        run_id: The run.
        ca_pem: Its own certificate, which every peer of the run trusts.
        key_pem: Its private key.
        expires_s: Unix time at which it, and all that it issues, ceases to be valid.
    """

    run_id: str
    ca_pem: str
    key_pem: str = field(repr=False)
    expires_s: int

    @classmethod
    def create(cls, run_id: str, lifetime_s: float) -> Self:
        """Make the authority of a run.

        Args:
            run_id: The run.
            lifetime_s: How long it is valid, in seconds.

        Raises:
            ConfigError: ``lifetime_s`` is no length of time.
        """
        from sky_monarch import _core

        return cls.from_json(json.loads(_core.make_authority(run_id, lifetime_s)))

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Self:
        """The authority that :meth:`to_json` kept.

        Raises:
            ConfigError: Something is missing or of the wrong kind. The message shows none of it.
        """
        texts = [kept.get(name) for name in ("run_id", "ca_pem", "key_pem")]
        expires_s = kept.get("expires_s")
        if not all(isinstance(text, str) and text for text in texts) or not isinstance(expires_s, int):
            raise ConfigError("this is no authority: it needs run_id, ca_pem, key_pem and expires_s")
        run_id, ca_pem, key_pem = (str(text) for text in texts)
        return cls(run_id=run_id, ca_pem=ca_pem, key_pem=key_pem, expires_s=expires_s)

    def to_json(self) -> dict[str, Any]:
        """What :meth:`from_json` takes, as JSON values. Secret."""
        return {
            "run_id": self.run_id,
            "ca_pem": self.ca_pem,
            "key_pem": self.key_pem,
            "expires_s": self.expires_s,
        }

    def issue(self, name: str) -> dict[str, str]:
        """Issue a certificate, good for as long as the authority.

        Args:
            name: Who shows it: ``controller``, ``lighthouse``, or of an agent ``<host>-a<attempt>``.

        Returns:
            An identity: ``{"name", "ca_pem", "cert_pem", "key_pem"}``. Secret.

        Raises:
            ConfigError: ``name`` is not made of letters, digits and hyphens, 63 at most; or the authority is damaged.
        """
        from sky_monarch import _core

        identity: dict[str, str] = json.loads(_core.issue_identity(json.dumps(self.to_json()), name))
        return identity
