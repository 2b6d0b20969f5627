"""Reading the texts and JSON files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import UserError


def read_text(path: Path) -> str:
    """The text in a file, with Unix line ends. Raises UserError if it is absent or unreadable."""
    try:
        return path.read_text(encoding="utf-8-sig")  # PowerShell puts a byte order mark first
    except FileNotFoundError:
        raise UserError(f"{path} is missing: check its name, or give a complete folder.") from None
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a name with a null character
        raise UserError(f"{path} cannot be read ({error}): copy it again, as UTF-8.") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file. Raises UserError if it is absent, unreadable or not an
    object."""
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}): copy or download it again.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object: copy or download it again.")
    return content
