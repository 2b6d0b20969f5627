"""The application on Ray. `.ci/run` installs Ray and runs these, and not the default run."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import psutil
import pytest
import torch

from shared.checkpoint import load
from shared.course import stages
from shared.models import STORIES
from shared.paths import ROOT
from shared.server import free_ports
from shared.testing import python
from shared.tokenizer import Tokenizer
from stage06_serving.tests.asking import until
from stage06_serving.tests.tools import alone, words
from stage12_distributed.tests.test_router import LONG, PROMPTS, SERVERS, client_of, stream

STAGE = ROOT / "stage12_distributed"
QUICKLY = {  # scaled, by what is in flight now
    "max_replicas": 3,
    "target_ongoing_requests": 2,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 1.0,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 5.0,  # longer than a lull in the clients' load on two busy cores
}


def test_without_ray_there_is_one_sentence():
    code = "import sys; sys.modules['ray'] = None; from shared import cli; "
    code += "from stage12_distributed.__main__ import main; cli.run(main, ['serve'])"
    done = python("-c", code)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "error: Ray is not installed: run `python -m pip install -r "
        "requirements-distributed.txt`.\n"
    )


def test_nothing_else_imports_ray():
    found = sorted(
        path.relative_to(ROOT).as_posix()
        for path in ROOT.glob("s*/**/*.py")
        if re.search(r"^\s*(import|from) ray\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert found == [
        "stage12_distributed/router/serve.py",
        "stage12_distributed/tests/test_serve.py",
    ]


class OnRay:
    """The application on a Ray of its own."""

    def __init__(self) -> None:
        self.port, self.ray_port = free_ports(2)
        self.direct, self.through = (
            f"http://127.0.0.1:{port}" for port in (self.port, self.ray_port)
        )

    def ready(self, count: int = 2, most: float = math.inf) -> bool:
        """This many replicas exist, all may get requests, and none has more than `most`."""
        try:
            found = httpx2.get(f"{self.direct}/health", trust_env=False).json()["replicas"].values()
        except httpx2.TransportError:  # the front opens its own port a moment after Ray's
            return False
        return len(found) == count and all(
            one["ready"] and one["requests"] <= most for one in found
        )


@pytest.fixture(scope="module")
def cluster() -> Iterator[OnRay]:
    pytest.importorskip("ray")
    from stage12_distributed.router import serve

    made = OnRay()
    try:
        serve.start(2, made.port, made.ray_port, list(SERVERS), **QUICKLY)
        until(made.ready)
        yield made
    finally:
        serve.stop()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
class TestOnRay:
    def test_tokens_are_those_of_the_first_stage(self, cluster):
        """Both past Ray's proxy and through it."""
        tokenizer = Tokenizer.from_folder(STORIES)
        model = stages.load_model(load("stories"), dtype=torch.float64)
        for url in (cluster.direct, cluster.through):
            with client_of(url) as client:
                for prompt in PROMPTS:
                    ids = alone(model, tokenizer.encode(prompt), words(24))
                    assert stream(client, prompt, 24)[1] == tokenizer.decode(ids)
                names = set()
                for _ in range(3):
                    until(lambda: cluster.ready(most=0))  # the last one's load no longer counts
                    names.add(stream(client, PROMPTS[0] * 9, 4)[0])
                assert len(names) == 1  # where its blocks are

    def test_ray_tells_nobody(self, cluster):
        from ray._common.usage import usage_lib

        assert not usage_lib.usage_stats_enabled()

    def test_a_server_that_dies_is_replaced(self, cluster):
        """Requests running there end with an error, and the next one finds the other server."""
        servers = [
            process
            for process in psutil.Process().children(recursive=True)
            if "stage12_distributed.router.child" in process.cmdline()
        ]
        assert len(servers) == 2
        servers[0].kill()
        with client_of(cluster.direct) as client:
            for _ in range(4):
                text = client.completions.create(prompt=PROMPTS[0], max_tokens=4, **LONG)
                assert text.choices[0].text
            until(cluster.ready)

    def test_servers_come_and_go_with_the_load(self, cluster):
        """Under load, a third server answers; after the load, it ends. No request fails."""
        names, over = Counter[str](), threading.Event()

        def ask(number: int) -> None:
            while not over.is_set():
                name, text = stream(client, PROMPTS[number % 3], 600)
                assert text
                names[name] += 1

        with client_of(cluster.direct) as client:
            with ThreadPoolExecutor(12) as pool:
                asking = [pool.submit(ask, number) for number in range(12)]
                try:
                    until(lambda: cluster.ready(3) and len(names) == 3)
                finally:
                    over.set()
                for each in asking:
                    each.result()
            until(cluster.ready)
            assert stream(client, PROMPTS[0], 4)[1]

    @pytest.mark.parametrize("name", ["serve.yaml", "rayservice.yaml"])
    def test_the_files_for_clusters_are_valid(self, name):
        pytest.importorskip("ray")
        import yaml
        from ray.serve.schema import ServeDeploySchema

        from stage12_distributed.router import serve

        config = yaml.safe_load((STAGE / name).read_text(encoding="utf-8"))
        if "spec" in config:
            config = yaml.safe_load(config["spec"]["serveConfigV2"])
        (application,) = ServeDeploySchema.model_validate(config).applications
        assert application.import_path == "stage12_distributed.router.serve:build"
        assert {one.name for one in application.deployments} == {"Engine", "Front"}
        assert serve.build(application.args).__class__.__name__ == "Application"
