"""The application on Ray: not in the default run. The lesson's session was tried by hand."""

from __future__ import annotations

from typing import Any

import pytest

from shared.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", ["serve.yaml", "rayservice.yaml"])
def test_the_files_for_clusters_are_valid(name):
    pytest.importorskip("ray")
    import yaml
    from ray.serve.schema import ServeDeploySchema

    from stage12_distributed import serve

    config = yaml.safe_load((ROOT / "stage12_distributed" / name).read_text(encoding="utf-8"))
    if "spec" in config:
        config = yaml.safe_load(config["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "stage12_distributed.serve:build"
    assert {deployment.name for deployment in application.deployments} == {"Engine", "Front"}
    assert serve.build(application.args).__class__.__name__ == "Application"


def test_the_front_keeps_its_servers_while_ray_cannot_name_them():
    """Before the first one has started, and where a machine is busy."""
    pytest.importorskip("ray")
    import asyncio
    from types import SimpleNamespace
    from unittest.mock import AsyncMock, Mock

    from ray.serve._private.common import DeploymentID
    from ray.serve.exceptions import DeploymentUnavailableError

    from stage12_distributed import serve

    none: Any = DeploymentUnavailableError(DeploymentID("Engine", "staircase"))
    answers = [none, ["http://a", TimeoutError(), "http://b"], TimeoutError(), ["http://b"]]
    engines = Mock()
    engines.broadcast.return_value.results_async = AsyncMock(side_effect=answers)
    front, deployment = SimpleNamespace(engines=engines, urls=[]), vars(serve)["Front"]
    found = [asyncio.run(deployment.func_or_class.find(front)) for _ in range(4)]
    assert found == [[], ["http://a", "http://b"], ["http://a", "http://b"], ["http://b"]]
