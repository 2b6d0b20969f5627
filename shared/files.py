"""Reading files whose names a user gives, and the JSON files of a checkpoint folder."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from .errors import UserError

MOST_BYTES = 2**27  # of a text: the largest tokenizers have 35 MB


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """What is in the file. Raises OSError, also if there are more than `most` bytes: a device may
    have no end, so what is read is counted, and not the size that the system states."""
    with open(path, "rb", opener=_open) as file:
        data = file.read(most + 1)
    if len(data) > most:
        size = f"{most // 2**20} MiB" if most >= 2**20 else f"{most} bytes"
        raise OSError(errno.EFBIG, f"it is over {size}")
    return data


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The text in a file of at most `most` bytes, with lines that end in "\\n". Raises OSError as
    `read_bytes` does, and UnicodeDecodeError."""
    text = read_bytes(path, most).decode("utf-8-sig")  # PowerShell puts a byte order mark first
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _open(path: str, flags: int) -> int:
    """Opens a pipe without waiting for a program that writes to it: without one it is empty."""
    number = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if hasattr(os, "O_NONBLOCK"):
        os.set_blocking(number, True)
    return number


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file. Raises UserError if it is absent, unreadable or not an
    object."""
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: give a complete checkpoint folder.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read as JSON ({error}): copy or download it again."
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object: copy or download it again.")
    return content
