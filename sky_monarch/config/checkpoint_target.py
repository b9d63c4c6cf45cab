"""Where checkpoints may go: a folder, or a URL of a store that fsspec knows."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from urllib.parse import urlsplit

from sky_monarch.config.problem import FieldRefusalError
from sky_monarch.errors import ConfigError

__all__ = [
    "client_of",
    "folder_of",
    "require_client",
    "require_no_credentials",
    "require_store",
    "require_usable",
]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")

# What serves a scheme, and how to get it.
_NEEDS = {
    "s3": ("s3fs", "pip install 'sky-monarch[s3]'"),
    "s3a": ("s3fs", "pip install 'sky-monarch[s3]'"),
    "gs": ("gcsfs", "pip install gcsfs"),
    "gcs": ("gcsfs", "pip install gcsfs"),
    "az": ("adlfs", "pip install adlfs"),
    "abfs": ("adlfs", "pip install adlfs"),
    "abfss": ("adlfs", "pip install adlfs"),
}
# fsspec knows them, and yet: nothing can be kept there.
_UNFIT = {
    "memory": "that is the memory of one process, which is gone when a checkpoint is needed",
    "http": "nothing can be written there",
    "https": "nothing can be written there",
    "data": "nothing can be written there",
}


def folder_of(target: str) -> str | None:
    """The folder that ``target`` names; None for the URL of a store.

    Raises:
        FieldRefusalError: A ``file:`` URL that names another host.
    """
    scheme = _SCHEME.match(target)
    if scheme is None:
        return target
    if scheme[1].lower() != "file":
        return None
    url = urlsplit(target)
    if url.netloc not in ("", "localhost"):
        raise FieldRefusalError(
            f"names the host {url.netloc[:80]}", fix="write file:///folder, with three slashes"
        )
    return url.path


def require_no_credentials(target: str) -> None:
    """Refuse a URL that holds what must not be shown and stored.

    Raises:
        FieldRefusalError: It has userinfo or a query.
    """
    url = urlsplit(target) if _SCHEME.match(target) else None
    if url is not None and url.scheme != "file" and ("@" in url.netloc or url.query):
        raise FieldRefusalError(
            "must hold no credentials: it is shown and stored",
            fix="give them in `secrets`, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )


def require_store(target: str) -> None:
    """Refuse a URL that names nothing where checkpoints can be kept, whatever is installed.

    Args:
        target: A URL, not a folder.

    Raises:
        FieldRefusalError: Saying what is wrong with the URL.
    """
    url = urlsplit(target)
    scheme = url.scheme.lower()
    if scheme in _UNFIT:
        raise FieldRefusalError(f"cannot be {scheme}://: {_UNFIT[scheme]}", fix="name a folder, or s3://…")
    require_no_credentials(target)
    if not url.netloc:
        raise FieldRefusalError(f"names no bucket: {target[:80]}", fix=f"write {scheme}://bucket/folder")
    if scheme not in _NEEDS and find_spec("fsspec") is not None:
        from fsspec.registry import known_implementations

        if scheme not in known_implementations:
            raise FieldRefusalError(
                f"no store is known for {scheme}://", fix="name a folder, or a URL such as s3://bucket/folder"
            )


def client_of(target: str) -> str | None:
    """The module by which processes save to a store, ``s3fs``; None for a folder."""
    scheme = _SCHEME.match(target)
    if scheme is None or scheme[1].lower() == "file":
        return None
    return _NEEDS.get(scheme[1].lower(), ("fsspec", ""))[0]


def require_client(target: str, *, find: Callable[[str], object | None] = find_spec) -> None:
    """Refuse a store that this interpreter has no client for. Imports nothing.

    Args:
        target: Of a job; a folder needs none.
        find: How to learn whether a module is there.

    Raises:
        ConfigError: Naming what is missing and how to get it.
    """
    client = client_of(target)
    if client is None:
        return
    scheme = urlsplit(target).scheme.lower()
    fix = _NEEDS.get(scheme, ("", "pip install fsspec"))[1]
    for module in dict.fromkeys(("fsspec", client)):
        if find(module) is None:
            raise ConfigError(f"checkpoint.to: {scheme}:// needs {module}, which is not installed", hint=fix)


def require_usable(target: str, *, find: Callable[[str], object | None] = find_spec) -> None:
    """Refuse a URL that this interpreter cannot save to. Imports nothing that costs, unless it has to.

    Args:
        target: A URL, not a folder.
        find: How to learn whether a module is there.

    Raises:
        FieldRefusalError: What is wrong with the URL.
        ConfigError: What is missing, and how to get it.
    """
    require_store(target)
    require_client(target, find=find)
