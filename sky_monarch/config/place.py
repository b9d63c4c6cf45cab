"""The form of ``infra``: which parts a place has, one spelling for each. Whether it is there a plan knows."""

from __future__ import annotations

import re

from sky_monarch.config.problem import FieldRefusalError

__all__ = ["read_infra"]

# Other names of the places that SkyPilot calls by the right-hand one; a plan has one spelling.
_PLACES = {"kubernetes": "k8s", "digitalocean": "do", "oracle": "oci"}
_CLOUD = ("a region", "a zone")
#: What may follow the first part; names of Kubernetes contexts may hold slashes themselves.
_PARTS = {"slurm": ("a cluster", "a partition"), "ssh": ("a pool",)}
_WHOLE = "k8s"


def read_infra(text: str) -> str:
    """A place as a plan spells it.

    Raises:
        FieldRefusalError: It has not the form of one.

    >>> read_infra("Kubernetes/my-context"), read_infra("slurm/alps/gpu"), read_infra("runpod")
    ('k8s/my-context', 'slurm/alps/gpu', 'runpod')
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@*-]{0,199}", text):
        raise FieldRefusalError(
            f"must be a place such as local, slurm, k8s/context or runpod, not {_shown(text)}"
        )
    head, *rest = text.split("/")
    place = _PLACES.get(head.lower(), head.lower())
    if place == "local" and rest:
        raise FieldRefusalError("local takes no /: it is this machine", suggestion="local")
    if "" in rest:
        raise FieldRefusalError(
            f"{_shown(text)} has nothing after a /", suggestion="/".join([place, *filter(None, rest)])
        )
    names = _PARTS.get(place, _CLOUD)
    if place != _WHOLE and len(rest) > len(names):
        form = "/".join([place, *(name.split()[-1].upper() for name in names)])
        raise FieldRefusalError(
            f"{_shown(text)} names more than {' and '.join(names)}: the form is {form}",
            suggestion="/".join([place, *rest[: len(names)]]),
        )
    return "/".join([place, *rest])


def _shown(text: str) -> str:
    return repr(text if len(text) <= 50 else f"{text[:46]}...")
