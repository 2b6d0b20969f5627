"""An engine on several ranks, for stage 06's server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stage04_continuous.engine import Engine
from stage04_continuous.request import Request
from stage06_serving.engines import Paged


class Served(Paged):
    """The engine that `gang.make` makes."""

    def __init__(self, engine: Engine) -> None:
        self._runner: Any = engine.runner
        super().__init__(engine)

    @property
    def variants(self) -> Mapping[str, bytes]:
        adapters = self._runner.gang.model.adapters
        return adapters.names if adapters else {}

    @property
    def health(self) -> str:
        return "ok" if self._runner.gang.up else "restarting"

    def add(self, request: Request) -> Request:
        if not self.requests:  # a rank that ended meanwhile costs no request
            self._runner.renew()
        return super().add(request)
