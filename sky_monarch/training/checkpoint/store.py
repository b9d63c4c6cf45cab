"""Checkpoints on a store that fsspec knows, such as S3: complete folders go up file by file, the marker last.

Every checkpoint has a prefix of its own, so what is there under a file's name is that file, or a part of it:
an upload that was cut off goes on with what is missing. On S3 that holds for the parts of a file, too.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sky_monarch.errors import CheckpointError
from sky_monarch.training.checkpoint.folder import Complete
from sky_monarch.training.checkpoint.layout import MARKER, NOT_COMPLETED, Marker, step_of

__all__ = ["CheckpointStore"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_JOURNAL = ".upload.json"
_PART_BYTES = 16 << 20
_MOST_PARTS = 9_000  # S3 takes 10,000
_AT_ONCE = 4
_TRIES, _BACKOFF_S, _BACKOFF_MAX_S = 6, 0.5, 8.0
# What trying again does not mend.
_FINAL = (FileNotFoundError, PermissionError)
_FINAL_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError")


class CheckpointStore:
    """The checkpoints below one URL.

    Credentials come from the environment, as the store's own library reads them.

    Args:
        url: Such as ``s3://bucket/folder``.
        cancelled: Set where this process leaves: what is under way is given up.
        part_bytes: Size of a part of a file.
    """

    def __init__(self, url: str, *, cancelled: threading.Event, part_bytes: int = _PART_BYTES) -> None:
        self.url = url
        self._cancelled = cancelled
        self._part_bytes = part_bytes
        self._open: tuple[Any, str] | None = None

    @property
    def _fs(self) -> Any:
        return self._opened()[0]

    @property
    def _root(self) -> str:
        return self._opened()[1]

    def _opened(self) -> tuple[Any, str]:
        if self._open is None:  # not before it is needed: it starts a thread
            from fsspec.core import url_to_fs

            fs, root = url_to_fs(self.url)
            self._open = fs, root.rstrip("/")
        return self._open

    def survey(self) -> tuple[list[Complete], dict[str, str]]:
        """All complete checkpoints, ascending, and what looks like one and is none, with the reason.

        Raises:
            CheckpointError: The store cannot be read. (Not "there is none"!)
        """
        complete: list[Complete] = []
        broken: dict[str, str] = {}
        for name, sizes in self._sizes().items():
            if MARKER not in sizes:
                broken[name] = NOT_COMPLETED
                continue
            try:
                data = self._try(f"read {name}/{MARKER}", self._fs.cat_file, self._path(name, MARKER))
                marker = Marker.decode(data)
                for file, expected in marker.files.items():
                    if sizes.get(file) != expected.size:
                        raise CheckpointError(f"{file} has {sizes.get(file)} bytes, not {expected.size}")
            except CheckpointError as error:
                broken[name] = str(error)
            else:
                complete.append(Complete(name, marker))
        return sorted(complete, key=lambda it: (it.step, it.name)), broken

    def fetch(self, name: str, file: str, path: Path) -> None:
        """Download one file.

        Raises:
            CheckpointError: It could not be had.
        """
        self._try(f"download {name}/{file}", self._fs.get_file, self._path(name, file), str(path))

    def upload(self, home: Path, it: Complete) -> None:
        """Upload a checkpoint, or what is missing of it.

        Raises:
            CheckpointError: It could not be completed. What is there stays, and the next try goes on from it.
        """
        there = self._sizes().get(it.name, {})
        for file, facts in it.marker.files.items():
            if there.get(file) != facts.size:
                self._upload_file(home, it.name, file, facts.size)
        # Whoever found half of it to be out of date may have removed something meanwhile.
        there = self._sizes().get(it.name, {})
        gone = [file for file, facts in it.marker.files.items() if there.get(file) != facts.size]
        if gone:
            raise CheckpointError(f"{', '.join(gone)} vanished from {self.url}/{it.name}")
        self._try(
            f"upload {it.name}/{MARKER}",
            self._fs.pipe_file, self._path(it.name, MARKER), (home / MARKER).read_bytes(),
        )  # fmt: skip

    def retire(self, keep: int, *, newest: str) -> None:
        """Remove all but the ``keep`` newest steps, and half ones that are older than ``newest``."""
        complete, broken = self.survey()
        step = step_of(newest) or 0
        kept_steps = sorted({it.step for it in complete})[-keep:]
        names = [
            it.name
            for it in complete
            if it.name != newest and it.step not in kept_steps and it.step < kept_steps[-1]
        ]
        names += [name for name in broken if (step_of(name) or step) < step]
        for name in names:
            # The marker goes first: what is cut off here must not look complete.
            for path in sorted(self._files(name), key=lambda path: not path.endswith(f"/{MARKER}")):
                self._try(f"remove {path}", self._fs.rm_file, path)
        if self._is_s3:
            self._abort_older(step)

    # --- one file -----------------------------------------------------------------------------------------

    def _upload_file(self, home: Path, name: str, file: str, size: int) -> None:
        path = self._path(name, file)
        if self._is_s3 and size > self._part_bytes:
            self._upload_parts(home, file, path, size)
        else:
            self._try(f"upload {name}/{file}", self._fs.put_file, str(home / file), path)

    def _upload_parts(self, home: Path, file: str, path: str, size: int) -> None:
        bucket, key, _ = self._fs.split_path(path)
        place = {"Bucket": bucket, "Key": key}
        part_bytes = max(self._part_bytes, -(-size // _MOST_PARTS))
        count = -(-size // part_bytes)
        journal = _Journal(home / _JOURNAL)
        upload_id = journal.get(file)
        etags: dict[int, str] = {}
        if upload_id is not None:
            try:
                etags = {
                    part["PartNumber"]: part["ETag"]
                    for part in self._parts(place, upload_id)
                    if part["Size"] == min(part_bytes, size - (part["PartNumber"] - 1) * part_bytes)
                }
                logger.info("%s: going on after %d of %d parts", path, len(etags), count)
            except FileNotFoundError:
                upload_id = None  # it was aborted meanwhile
        if upload_id is None:
            upload_id = str(self._s3("create_multipart_upload", **place)["UploadId"])
            journal.put(file, upload_id)

        def send(number: int) -> None:
            with (home / file).open("rb") as content:
                content.seek((number - 1) * part_bytes)
                body = content.read(part_bytes)
            sent = self._s3("upload_part", **place, UploadId=upload_id, PartNumber=number, Body=body)
            etags[number] = sent["ETag"]

        missing = [number for number in range(1, count + 1) if number not in etags]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="upload") as pool:
            try:
                for done in [pool.submit(send, number) for number in missing]:
                    done.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
        self._s3("complete_multipart_upload", **place, UploadId=upload_id, MultipartUpload={"Parts": parts})

    def _parts(self, place: dict[str, str], upload_id: str) -> Iterator[dict[str, Any]]:
        after = 0
        while True:
            page = self._s3("list_parts", **place, UploadId=upload_id, PartNumberMarker=after)
            yield from page.get("Parts", [])
            if not page.get("IsTruncated"):
                return
            after = page["NextPartNumberMarker"]

    def _abort_older(self, step: int) -> None:
        """End uploads that nobody will go on with: S3 bills their parts."""
        bucket, prefix, _ = self._fs.split_path(f"{self._root}/step-")
        page = self._s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
        for upload in page.get("Uploads", []):
            name = upload["Key"].removeprefix(prefix.removesuffix("step-")).split("/")[0]
            if (step_of(name) or step) < step:
                self._s3(
                    "abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )

    # --- the store ----------------------------------------------------------------------------------------

    @property
    def _is_s3(self) -> bool:
        return hasattr(self._fs, "call_s3")

    def _s3(self, method: str, **arguments: Any) -> dict[str, Any]:
        result: dict[str, Any] = self._try(method.replace("_", " "), self._fs.call_s3, method, **arguments)
        return result

    def _path(self, name: str, file: str) -> str:
        return f"{self._root}/{name}/{file}"

    def _files(self, name: str) -> list[str]:
        self._fs.invalidate_cache()
        return list(self._try(f"list {name}", self._fs.find, f"{self._root}/{name}"))

    def _sizes(self) -> dict[str, dict[str, int]]:
        """Sizes of all files, by checkpoint and file."""
        self._fs.invalidate_cache()
        try:
            found = self._try(f"list {self.url}", self._fs.find, self._root, detail=True)
        except FileNotFoundError:
            return {}
        sizes: dict[str, dict[str, int]] = {}
        for path, facts in found.items():
            name, _, file = path[len(self._root) :].strip("/").partition("/")
            if step_of(name) is not None and file:
                sizes.setdefault(name, {})[file] = int(facts["size"])
        return sizes

    def _try(self, what: str, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call the store, again after a failure that may pass.

        Raises:
            FileNotFoundError: There is no such thing.
            CheckpointError: It failed for good, or too often, or this process leaves.
        """
        for attempt in range(1, _TRIES + 1):
            if self._cancelled.is_set():
                break
            try:
                return call(*arguments, **named)
            except FileNotFoundError:
                raise
            except Exception as error:  # the stores' libraries have no common tree
                final = isinstance(error, _FINAL) or type(error).__name__ in _FINAL_NAMES
                if final or attempt == _TRIES:
                    raise CheckpointError(f"cannot {what}: {type(error).__name__}: {error}") from error
                pause_s = min(_BACKOFF_MAX_S, _BACKOFF_S * 2 ** (attempt - 1))
                logger.info("%s failed (%s), once more in %.1f s", what, error, pause_s)
                self._cancelled.wait(pause_s)
        raise CheckpointError(f"cannot {what}: this process leaves")


class _Journal:
    """Ids of S3's uploads under way, beside the files that they upload."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, file: str) -> str | None:
        return self._read().get(file)

    def put(self, file: str, upload_id: str) -> None:
        partial = self._path.with_name(f"{self._path.name}.{time.monotonic_ns()}")
        partial.write_text(json.dumps({**self._read(), file: upload_id}))
        partial.replace(self._path)

    def _read(self) -> dict[str, str]:
        try:
            return dict(json.loads(self._path.read_text()))
        except (OSError, ValueError):
            return {}  # parts are uploaded again, no more
