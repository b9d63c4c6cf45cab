"""Where hosts dial the head: one address of this machine, chosen before anything is started."""

from __future__ import annotations

import ipaddress
import socket

from sky_monarch.errors import ConfigError

__all__ = ["LOOPBACK", "head_address", "is_loopback"]

LOOPBACK = "127.0.0.1"

# Documentation addresses (RFC 5737, RFC 3849): nobody has them, so they are routed as everything unknown is. A UDP
# socket that is connected sends nothing.
_FAR = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_FIX = "give the address that the hosts reach: --head-address ADDRESS"


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches it."""
    return ipaddress.ip_address(address).is_loopback


def head_address(given: str | None) -> str:
    """The address that hosts dial, as a number.

    Args:
        given: What the user chose: an address of this machine, or a name for one. None: the source address of the
            default route.

    Raises:
        ConfigError: This machine has no such address, or none can be chosen.
    """
    if given is not None:
        return _checked(given)
    for family, far in _FAR:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far, 9))
                found = str(probe.getsockname()[0])
        except OSError:
            continue
        if not is_loopback(found) and not ipaddress.ip_address(found).is_link_local:
            return found
    raise ConfigError(
        "this machine has no route to others, so no address can be chosen for the head", hint=_FIX
    )


def _checked(given: str) -> str:
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(given, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--head-address {given}: it names no address ({error})", hint=_FIX) from error
    for text in found:
        address = ipaddress.ip_address(text.partition("%")[0])
        if address.is_unspecified or address.is_multicast:
            raise ConfigError(f"--head-address {given}: no host can dial {address}", hint=_FIX)
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((str(address), 0))
        except OSError:
            continue
        return str(address)
    raise ConfigError(
        f"--head-address {given}: this machine has no such address, and ports are not forwarded in this version",
        hint="choose one that `ip addr` lists and the hosts reach, or start `up` on a machine that they reach",
    )
