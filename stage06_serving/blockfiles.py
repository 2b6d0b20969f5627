"""A folder of blocks, one in a file, for several servers at a time. Knows no engine.

A file's name says what is in it: a digest of the block's tokens, of all before them, and of
everything else that keys and values depend on. It is written under another name and then renamed,
so a process that is killed leaves no half of it. What is read must be perfect, to the last token;
else it is a miss, and the file goes. A checksum suffices: no other user may write here.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import struct
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from shared.errors import UserError

from .status import DiskCounts

log = logging.getLogger(__name__)
VERSION = b"staircase blocks 1"  # raise it when what a cache keeps in a block changes
HEADER = struct.Struct("<18s32sI")  # VERSION, the name, CRC-32 of all that follows: ids and content
SUFFIX, UNFINISHED = ".kv", ".tmp"
OURS = re.compile(rf"[0-9a-f]{{64}}(\{SUFFIX}|\.\w+\{UNFINISHED})")  # the names of our files
ABANDONED = 60.0  # seconds after which the unfinished file of a killed process is removed
SPARE = 0.05  # share of the cap that is freed at once: to find what is old, all files are listed


def open_folder(name: str) -> Path:
    """The folder, made with mode 0700 if it does not exist. Raises UserError if it cannot be
    written, or if others may use it: it holds prompts, and its content becomes answers."""
    try:
        folder = Path(name).expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: "~" of an unknown user
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"--prefix-cache-dir {name} cannot be written ({why}): give a folder that "
            "this user may write to."
        ) from None
    if hasattr(os, "getuid") and (about.st_mode & 0o077 or about.st_uid != os.getuid()):
        raise UserError(
            f"--prefix-cache-dir {folder} is open to other users, who could read prompts or change "
            "answers: run `chmod 700` on it, or give a folder of your own."
        )
    return folder


class BlockFiles:
    """The files in `folder`, at most `cap` bytes of them. space: a digest of what blocks depend on
    besides their tokens. ids, content: bytes that a block's token ids and its content take.

    One thread may write, and another one read; `in` is for any thread and does not touch the disk.
    Raises UserError if `cap` is less than one file.
    """

    def __init__(self, folder: Path, cap: int, space: bytes, ids: int, content: int) -> None:
        self.folder, self.cap, self.space, self.counts = folder, cap, space, DiskCounts()
        self.ids_bytes, self.file_bytes = ids, HEADER.size + ids + content
        if cap < self.file_bytes:
            raise UserError(
                f"--prefix-cache-size is {cap} bytes, and a block takes {self.file_bytes} in its "
                "file: give more."
            )
        self._names: set[str] = set()  # as last seen
        self.scanned = 0.0  # time.monotonic()
        self.scan()

    def __contains__(self, digest: bytes) -> bool:
        return self._name(digest) in self._names

    def _name(self, digest: bytes) -> str:
        return hashlib.sha256(self.space + digest).hexdigest()

    def _path(self, name: str) -> Path:
        return self.folder / (name + SUFFIX)

    # ---- the reader -----------------------------------------------------------------------------

    def read(self, digest: bytes, ids: bytes, used: float) -> memoryview | None:
        """The content of a block with these token ids, last used at `used` (`time.time()`); None
        if there is no perfect file."""
        name = self._name(digest)
        path = self._path(name)
        try:
            with path.open("rb") as file:
                data = bytearray(self.file_bytes)
                whole = file.readinto(data) == self.file_bytes and not file.read(1)
            if whole and self._is_perfect(data, name, ids):
                os.utime(path, (used, used))
                self.counts.read_bytes += self.file_bytes
                return memoryview(data)[HEADER.size + self.ids_bytes :]
            self.counts.rejected += 1
            path.unlink(missing_ok=True)
        except FileNotFoundError:  # another server has removed it
            pass
        except OSError as error:
            log.warning("%s of the prefix cache cannot be read (%s).", path, error.strerror)
        self._names.discard(name)
        return None

    def _is_perfect(self, data: bytearray, name: str, ids: bytes) -> bool:
        version, stored, checksum = HEADER.unpack_from(data)
        rest = memoryview(data)[HEADER.size :]
        return (
            (version, stored) == (VERSION, bytes.fromhex(name))
            and rest[: self.ids_bytes] == ids
            and zlib.crc32(rest) == checksum
        )

    # ---- the writer -----------------------------------------------------------------------------

    def use(self, digest: bytes, used: float) -> None:
        """Note when a block was used. Raises OSError."""
        try:
            os.utime(self._path(self._name(digest)), (used, used))
        except FileNotFoundError:  # another server has removed it
            self._names.discard(self._name(digest))

    def write(self, digest: bytes, ids: bytes, used: float, parts: Sequence[memoryview]) -> None:
        """Keep a block whose content is all `parts`. Raises OSError."""
        if self.counts.total_bytes + self.file_bytes > self.cap:
            self._make_room()
        try:
            self._write(self._name(digest), ids, used, parts)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._make_room()
            self._write(self._name(digest), ids, used, parts)

    def _write(self, name: str, ids: bytes, used: float, parts: Sequence[memoryview]) -> None:
        checksum = zlib.crc32(ids)
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        number, unfinished = tempfile.mkstemp(UNFINISHED, f"{name}.", self.folder)  # mode 0600
        try:
            with open(number, "wb") as file:
                file.write(HEADER.pack(VERSION, bytes.fromhex(name), checksum) + ids)
                file.writelines(parts)
            os.utime(unfinished, (used, used))
            os.replace(unfinished, self._path(name))
        except OSError:
            Path(unfinished).unlink(missing_ok=True)
            raise
        self._names.add(name)
        self.counts.total_bytes += self.file_bytes
        self.counts.written_bytes += self.file_bytes

    def remove(self, digest: bytes) -> None:
        """Remove a block that is not trusted. Raises OSError."""
        self._names.discard(self._name(digest))
        self._path(self._name(digest)).unlink(missing_ok=True)

    def scan(self) -> list[os.DirEntry[str]]:
        """See which of our files there are, and remove abandoned ones. Returns them, the least
        recently used first. Raises OSError."""
        self.scanned, files = time.monotonic(), []
        for file in os.scandir(self.folder):
            if not OURS.fullmatch(file.name):  # not ours: it stays
                continue
            try:
                age = time.time() - file.stat().st_mtime
                if file.name.endswith(UNFINISHED) and age > ABANDONED:
                    os.unlink(file)
                else:
                    files.append(file)
            except FileNotFoundError:  # another server has removed it
                continue
        self._names = {Path(file).stem for file in files if file.name.endswith(SUFFIX)}
        self.counts.total_bytes = sum(file.stat().st_size for file in files)
        return sorted(files, key=lambda file: file.stat().st_mtime)

    def _make_room(self) -> None:
        """Remove the least recently used files, until one more fits and some room is spare: below
        the cap, or below what they take if the disk is full before."""
        files = self.scan()
        total = min(self.cap, self.counts.total_bytes)
        aim = total - max(self.file_bytes, int(SPARE * total))
        for file in files:
            if self.counts.total_bytes <= aim:
                break
            if file.name.endswith(SUFFIX):
                Path(file).unlink(missing_ok=True)
                self._names.discard(Path(file).stem)
                self.counts.total_bytes -= file.stat().st_size  # as seen by `scan`
