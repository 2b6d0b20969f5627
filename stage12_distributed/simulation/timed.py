"""The command `timed`: stage 06's server, which keeps the times of its passes for the simulator."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from shared import cli

from .passes import Meter

ABOUT = (
    "Stage 12, timed: stage 06's server with stage 05's engine; at exit it writes what each pass "
    "computed and how long it took. All other options are those of python -m stage06_serving."
)
EXAMPLES = """\
  python -m stage12_distributed timed --keep steps.json --port 8001
  python -m stage07_loadtest --url http://127.0.0.1:8001 --rates 2,4 --out run
  python -m stage12_distributed simulate --steps steps.json --replay run"""


class Maker:
    """What stage 06's server makes its engine with: the usual engine, and a Meter."""

    meter: Meter | None = None
    load = staticmethod(cli.load_model_from)

    def make(self, model: Any, **options: Any) -> Any:
        from stage05_paged.engine import make

        engine = make(model, **options)
        self.meter = Meter(engine)
        return engine

    def serve(self, engine: Any) -> Any:
        from stage06_serving.engines import Paged

        return Paged(engine)


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser("stage12_distributed timed", ABOUT, EXAMPLES)
    parser.add_argument(
        "--keep", type=Path, required=True, metavar="FILE", help="file to write the passes to"
    )
    options, rest = parser.parse_known_args(argv)
    from stage06_serving.__main__ import main as serve  # takes a second

    maker = Maker()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # uvicorn raises it again at its end
    try:
        return serve(["--engine", "paged", *rest], maker)
    finally:
        if maker.meter:
            options.keep.write_text(json.dumps(maker.meter.steps), encoding="utf-8")
