"""A server of our own: started, found, and always stopped."""

from __future__ import annotations

import urllib.request

import psutil
import pytest

from shared import server
from shared.errors import UserError


def test_a_server_is_started_and_stopped_whatever_happens(monkeypatch):
    monkeypatch.setattr(server, "MODULE", "stage07_loadtest.mock")  # so that no model is loaded
    for quiet in (True, False):
        with (
            pytest.raises(RuntimeError, match="what happens"),
            server.own_server(["--ttft", "0.01"], quiet=quiet) as running,
        ):
            with urllib.request.urlopen(f"{running.url}/v1/models", timeout=20) as answer:
                assert answer.status == 200
            assert psutil.Process(running.pid).is_running()
            raise RuntimeError("what happens")
        assert not psutil.pid_exists(running.pid)
    reason = r"The server did not start: .*--itl.*--help"
    with pytest.raises(UserError, match=reason), server.own_server(["--itl", "fast"]):
        pass
