"""What a program and the hosts that it attaches to prove themselves with: a certificate each, of one authority."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sky_monarch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping
    from typing import Self

__all__ = ["CLIENT", "HOST", "KEYS_ENV", "ActorKeys"]

#: Names in the certificates, which the other side checks (rust_core/src/mesh/gateway.rs).
CLIENT, HOST = "actor-client", "actor-host"
#: Environment variable that holds the keys of one side, as :meth:`ActorKeys.to_text` writes them. Secret.
KEYS_ENV = "ACTOR_KEYS"
_LIFETIME_S = 7 * 86400.0
_MOST_HOSTS = 4096


@dataclass(frozen=True, slots=True)
class ActorKeys:
    """The certificate and key of one side: of the program, or of one host. Secret.

    Attributes:
        identity: ``{"name", "ca_pem", "cert_pem", "key_pem"}``.
    """

    identity: Mapping[str, str] = field(repr=False)

    @classmethod
    def create(cls, hosts: int, lifetime_s: float = _LIFETIME_S) -> tuple[Self, list[Self]]:
        """Make the keys of a program, and those of so many hosts. The authority behind them is forgotten.

        Args:
            hosts: How many.
            lifetime_s: How long they are good, in seconds.

        Raises:
            ConfigError: There are no hosts, or too many.
        """
        if not 1 <= hosts <= _MOST_HOSTS:
            raise ConfigError(f"keys for {hosts} hosts", hint=f"from 1 to {_MOST_HOSTS}")
        from sky_monarch.actors.authority import Authority

        authority = Authority.create(f"actors-{os.urandom(6).hex()}", lifetime_s)
        return cls(authority.issue(CLIENT)), [cls(authority.issue(HOST)) for _ in range(hosts)]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The keys in a file.

        Raises:
            ConfigError: It cannot be read, or others can read it too, or it holds no keys. No message shows them.
        """
        try:
            with Path(path).open(encoding="ascii") as file:
                if os.fstat(file.fileno()).st_mode & 0o077:
                    raise ConfigError(f"{path} can be read by others", hint=f"chmod 600 {path}")
                return cls.from_text(file.read(), str(path))
        except OSError as error:
            hint = (
                "`sky-monarch actor-keys FOLDER` makes them" if isinstance(error, FileNotFoundError) else None
            )
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} cannot be read: it is no text") from error

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> Self | None:
        """The keys that the environment brings, and takes no further: they leave it."""
        text = environ.pop(KEYS_ENV, None)
        return None if text is None else cls.from_text(text, KEYS_ENV)

    @classmethod
    def from_text(cls, text: str, where: str) -> Self:
        """The keys that :meth:`to_text` wrote.

        Raises:
            ConfigError: They are damaged; ``where`` they come from is said.
        """
        try:
            found: Any = json.loads(base64.b64decode(text.strip(), validate=True))
        except ValueError:
            found = None
        names = ("name", "ca_pem", "cert_pem", "key_pem")
        if not isinstance(found, dict) or not all(isinstance(found.get(name), str) for name in names):
            raise ConfigError(f"{where} holds no keys", hint="`sky-monarch actor-keys FOLDER` makes them")
        return cls({name: found[name] for name in names})

    def to_text(self) -> str:
        """One line of text. Secret."""
        return base64.b64encode(json.dumps(dict(self.identity)).encode()).decode()

    def save(self, path: Path) -> None:
        """Write them to a new file that only this user can read.

        Raises:
            ConfigError: There is a file already, or it cannot be written.
        """
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w", encoding="ascii") as file:
                file.write(self.to_text() + "\n")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error

    @property
    def name(self) -> str:
        """Whose they are: :data:`CLIENT` or :data:`HOST`."""
        return self.identity["name"]

    def check(self, wanted: str) -> None:
        """Refuse the keys of the other side.

        Raises:
            ConfigError: They are not of ``wanted``.
        """
        if self.name != wanted:
            side = {CLIENT: "the program's: client.key", HOST: "a host's: host-0.key, …"}[wanted]
            raise ConfigError(f"these keys are of {self.name}", hint=f"what is needed here are {side}")
