"""Runs the stages' labs as a reader would, top to bottom: `python -m shared.course.notebooks`.

Each notebook runs in a new kernel of this Python, in its own folder. A lab fails at its first error
or when it takes too long. `--write` keeps the outputs in the file, for code hosts to show, without
what changes from run to run (times of execution, versions, the chunks of a stream).
"""

from __future__ import annotations

import base64
import io
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from PIL import Image
from tqdm import tqdm

from .. import cli, paths
from ..errors import UserError

LAB = "lab.ipynb"
LIMIT = 180  # seconds; a lab takes a minute, and CI machines are slow
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class LabError(Exception):
    """The cell that failed or took too long, and why."""


def labs() -> list[Path]:
    """The lab of every stage, in reading order. UserError if a stage has none."""
    files = [paths.ROOT / name / LAB for name in paths.discover()]
    for path in files:
        if not path.exists():
            raise UserError(f"{path.parent.name} has no {LAB}: write one, every stage has a lab.")
    return files


def read(path: Path) -> Any:
    """The notebook at `path`. Raises UserError if it is missing or invalid."""
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat raises many kinds for a damaged file
        problem = f"{path} is not a valid notebook ({type(error).__name__})"
        raise UserError(f"{problem}: correct the path, or repair the file.") from None


def execute(notebook: Any, folder: Path, limit: float, label: str) -> float:
    """Run all cells of `notebook` in `folder` and put their outputs in it; returns the seconds,
    including the kernel's start.

    Raises LabError at the first cell that fails, or after `limit` seconds in all.
    """
    # Only the kernel of this Python: a machine may have others installed under the same name.
    manager = AsyncKernelManager(
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), transport_encryption="auto"
    )
    client = NotebookClient(
        notebook,
        km=manager,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    started = time.perf_counter()
    with (
        client.setup_kernel(cleanup_kc=True),
        tqdm(notebook.cells, desc=label, unit="cell", leave=False) as bar,
    ):
        for index, cell in enumerate(bar):
            client.timeout = max(1, round(limit - (time.perf_counter() - started)))
            try:
                client.execute_cell(cell, index)
            except CellExecutionError as error:
                problem = COLOURS.sub("", str(error)).strip()
                raise LabError(f"cell {index} failed:\n{problem}") from None
            except CellTimeoutError:
                problem = f"was still running after the limit of {limit:g} s"
                raise LabError(f"cell {index} {problem}:\n{cell.source}") from None
            except DeadKernelError:
                problem = "ended the whole process, perhaps for lack of memory"
                raise LabError(f"cell {index} {problem}:\n{cell.source}") from None
    seconds = time.perf_counter() - started
    if seconds > limit:
        raise LabError(f"it took {seconds:.1f} s, and the limit is {limit:g} s")
    return seconds


def smaller(chart: str) -> str:
    """The PNG of a chart, in base64, with at most 64 colours: a third of the bytes."""
    image = Image.open(io.BytesIO(base64.b64decode(chart))).convert("RGB")
    file = io.BytesIO()
    image.quantize(64, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def tidy(notebook: Any) -> None:
    """Remove from `notebook` what changes from run to run or does not help a reader."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell in notebook.cells:
        cell.metadata.clear()
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata.clear()
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = smaller(output.data["image/png"])


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(
        "shared.course.notebooks",
        "Runs the labs of all stages, or the notebooks named, top to bottom.",
        "  python -m shared.course.notebooks\n"
        "  python -m shared.course.notebooks --write        keep the outputs in the files\n"
        "  python -m shared.course.notebooks stage02_kv_cache/lab.ipynb",
    )
    parser.add_argument(
        "notebooks",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="which ones; default: every stage's lab",
    )
    parser.add_argument("--write", action="store_true", help="keep the outputs in the files")
    parser.add_argument(
        "--limit",
        type=cli.number(0, 86_400, above=True),
        default=LIMIT,
        metavar="SECONDS",
        help="time limit for one notebook",
    )
    options = parser.parse_args(argv)
    failed = 0
    for path in options.notebooks or labs():
        path = path.resolve()
        name = paths.shown(path)
        notebook = read(path)
        try:
            seconds = execute(notebook, path.parent, options.limit, name)
        except LabError as error:
            print(f"{name}: {error}", flush=True)
            failed += 1
            continue
        print(f"{name}: {len(notebook.cells)} cells in {seconds:.1f} s", flush=True)
        if options.write:
            tidy(notebook)
            nbformat.write(notebook, path)
    if failed:
        print(f"{failed} failed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
