"""Reading files whose names a user gives, and the JSON files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import UserError

MOST_BYTES = 2**27  # of a text: the largest tokenizers have 35 MB


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """What is in the file. Raises OSError, also for more than `most` bytes: a device may have no
    end."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(f"it is over {most:,} bytes")
    return data


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The text in a file of at most `most` bytes, with lines that end in "\\n". Raises OSError and
    UnicodeDecodeError."""
    text = read_bytes(path, most).decode("utf-8-sig")  # PowerShell puts a byte order mark first
    return text.replace("\r\n", "\n").replace("\r", "\n")


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
