"""A server of our own: started, found, and always stopped."""

from __future__ import annotations

import urllib.request

import pytest

from shared.errors import UserError
from shared.server import own_server

MOCK = "stage07_loadtest.mock"  # which loads no model


def test_a_server_is_started_and_stopped_whatever_happens():
    with (
        pytest.raises(RuntimeError, match="what happens"),
        own_server(["--ttft", "0.01"], module=MOCK) as running,
    ):
        with urllib.request.urlopen(f"{running.url}/v1/models", timeout=20) as answer:
            assert answer.status == 200
        raise RuntimeError("what happens")
    assert running.process.poll() is not None
    reason = r"The server did not start: .*--itl.*--help"
    with pytest.raises(UserError, match=reason), own_server(["--itl", "fast"], module=MOCK):
        pass
