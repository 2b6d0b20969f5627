"""The router with processes of its own, each with the embedded model: equal tokens, kills, updates.

All tests share one router: a server takes seconds to start. The last test kills it.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
import torch

from shared.checkpoint import load
from shared.course import stages
from shared.models import STORIES
from shared.server import OwnServer, own_server
from shared.tokenizer import Tokenizer
from stage06_serving.settings import PREFIX
from stage06_serving.tests.asking import CHAT, HANG, joined, read_metrics, until
from stage06_serving.tests.conftest import environment
from stage06_serving.tests.tools import alone, words
from stage12_distributed.bench import streams as bench

PROMPTS = ("Once upon a time", "The old fox looked at the river", "Every morning, Anna")
SERVERS = ["--dtype", "float64", "--engine", "paged", "--linear", "plain"]
SERVERS += ["--threads", "1", "--kv-memory", "32MiB"]
KEY = "for the administrator"
LONG: dict[str, Any] = {"model": "stories", "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, in a place where a test can take it away."""
    return Path(shutil.copytree(STORIES, tmp_path_factory.mktemp("models") / "stories"))


@pytest.fixture(scope="module")
def router(folder: Path) -> Iterator[OwnServer]:
    options, keys = ["--model", str(folder), *SERVERS], {f"{PREFIX}ADMIN_KEY": KEY}
    with own_server(options, True, environment(keys), "stage12_distributed.router.app") as server:
        yield server
        assert "Traceback" not in server.stderr(), server.stderr()


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=HANG)


@pytest.fixture(scope="module")
def client(router: OwnServer) -> Iterator[openai.OpenAI]:
    with client_of(router.url) as client:
        yield client


def about(router: OwnServer) -> dict[str, Any]:
    health = httpx2.get(f"{router.url}/health", trust_env=False).json()
    return dict(health["replicas"])


def all_ready(router: OwnServer, replicas: int = 2) -> bool:
    return [facts["ready"] for facts in about(router).values()] == [True] * replicas


def idle(router: OwnServer, replicas: int = 2) -> bool:
    """Nothing is in flight at the router or its replicas, and no block is owned."""
    names = ("vllm:num_requests_", "vllm:kv_cache_usage", "staircase:replica_requests")
    numbers = read_metrics(router)
    values = [value for name, value in numbers.items() if name.startswith(names)]
    loads = [facts["requests"] + facts["tokens"] for facts in about(router).values()]
    return len(values) == 4 * replicas and not any(values) and not any(loads)


def children(router: OwnServer) -> list[psutil.Process]:
    """The processes of the replicas, the oldest first."""
    return sorted(psutil.Process(router.pid).children(), key=psutil.Process.create_time)


def stream(client: openai.OpenAI, prompt: str, count: int) -> Any:
    """The replica, and the text or None if the stream ended with an error. Fails if it just
    ended."""
    fields = {**LONG, "prompt": prompt, "max_tokens": count, "stream": True}
    raw = client.completions.with_raw_response.create(**fields)
    try:
        chunks: list[Any] = list(raw.parse())
    except openai.APIError:
        return raw.headers["x-replica"], None
    assert "length" in [chunk.choices[0].finish_reason for chunk in chunks]
    return raw.headers["x-replica"], joined(chunks)


def test_tokens_are_those_of_the_first_stage(client):
    tokenizer = Tokenizer.from_folder(STORIES)
    model = stages.load_model(load("stories"), dtype=torch.float64)
    for prompt in PROMPTS:
        expected = tokenizer.decode(alone(model, tokenizer.encode(prompt), words(24)))
        fields = {**LONG, "prompt": prompt, "max_tokens": 24}
        assert client.completions.create(**fields).choices[0].text == expected
        assert stream(client, prompt, 24)[1] == expected
        ids = {**fields, "prompt": tokenizer.encode(prompt)}
        assert client.completions.create(**ids).choices[0].text == expected


def test_a_chat_is_that_of_a_replica(router, client):
    """Including the last event of a stream, which has the counts."""
    lines = router.stderr().splitlines()
    urls = [line.split()[-1] for line in lines if "] Staircase serves" in line]
    fields = {**LONG, "messages": CHAT, "max_completion_tokens": 12, "stream": True}
    fields["stream_options"], answers = {"include_usage": True}, []
    for url in (router.url, *urls):
        with client_of(url) as other:
            *chunks, last = other.chat.completions.create(**fields)
            answers.append((joined(chunks), last.usage.completion_tokens))
    assert len(answers) == 3 and len(set(answers)) == 1 and answers[0][0]


def test_a_conversation_stays_where_its_blocks_are(router, client):
    begun = "".join(f"{name} saw a fox. " for name in ("Anna", "Ben", "Cleo", "Dora") * 6)
    before, replicas = read_metrics(router), set()
    for turn in range(4):
        begun += f"On day {turn} the river was quiet and the fox slept in the sun. "
        replicas.add(stream(client, begun, 4)[0])
    assert len(replicas) == 1
    name = f'vllm:prefix_cache_hits_total{{replica="{replicas.pop()}"}}'
    assert read_metrics(router)[name] - before[name] > 3 * 90  # tokens


def test_the_page_shows_a_replica(router):
    assert "<title>" in httpx2.get(f"{router.url}/", trust_env=False).text
    with httpx2.stream("GET", f"{router.url}/live", trust_env=False) as answer:
        line = next(line for line in answer.iter_lines() if line)
    frame = json.loads(line.removeprefix("data: "))
    assert frame["alive"] and frame["blocks"] > 0


def test_wrong_requests_get_the_replicas_own_words(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="another", prompt="a")
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.completions.create(model="stories", prompt="")


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_clients_that_leave_leave_nothing(router, client, count):
    def leave(number: int) -> None:
        prompt = PROMPTS[number % 3] + " and" * number
        fields = {**LONG, "prompt": prompt, "max_tokens": 900}
        if number % 4 == 3:  # before there is an answer
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.2).completions.create(**fields)
            return
        with client.completions.create(**fields, stream=True) as answer:
            for _ in range(number % 4):
                next(answer)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(count)))
    until(lambda: idle(router))


@pytest.mark.parametrize(
    ("kills", "replicas"), [(1, 2), pytest.param(100, 12, marks=pytest.mark.slow)]
)
def test_a_kill_loses_only_what_was_running_there(router, client, kills, replicas):
    """Each stream there ends with its answer or an error; streams on other replicas are whole. With
    many kills there are more replicas, some of which start while others run."""
    prompts = [bench.prompt(number) for number in range(8)]
    expected = [stream(client, prompt, bench.TOKENS)[1] for prompt in prompts]
    arguments = ("--replicas", str(replicas), *SERVERS)
    with nullcontext(router) if kills == 1 else bench.router(*arguments) as server:
        count = 0
        for streams in bench.deaths(server, kills):
            assert any(ended.there for ended in streams)
            for ended, text in zip(streams, expected, strict=True):
                if ended.there and ended.how == "error":
                    assert text.startswith(ended.text)
                else:
                    assert (ended.how, ended.text) == ("whole", text)
            count += 1
        assert count == kills
        until(lambda: all_ready(server, replicas) and idle(server, replicas))


@pytest.mark.slow
def test_a_replica_that_hangs_is_started_again(router, client):
    hangs = children(router)[0]
    hangs.suspend()
    texts = [stream(client, prompt, 4)[1] for prompt in PROMPTS * 2]  # some wait for its end
    until(lambda: not hangs.is_running() and all_ready(router))
    assert any(texts) and stream(client, PROMPTS[0], 4)[1]


def update(router: OwnServer) -> httpx2.Response:
    url, key = f"{router.url}/admin/update", {"x-admin-key": KEY}
    return httpx2.post(url, json={}, headers=key, timeout=HANG, trust_env=False)


def test_an_update_that_fails_changes_nothing(router, client, folder):
    old, away = children(router), folder.with_name("away")
    folder.rename(away)
    answer = update(router)
    away.rename(folder)
    assert answer.status_code == 400 and "did not start" in answer.json()["error"]["message"]
    assert children(router) == old and all_ready(router)
    assert stream(client, PROMPTS[0], 4)[1]


def test_an_update_fails_no_request(router, client):
    """New processes start before the old ones end, and the old ones end by themselves."""
    old, names = children(router), set(about(router))
    over, outcomes = threading.Event(), Counter[Any]()

    def ask(number: int) -> None:
        while not over.wait(0.1):  # the new processes need the processor too
            try:
                text = stream(client, PROMPTS[number], 30)[1]
                outcomes["whole" if text else "cut"] += 1
            except openai.APIError as error:
                outcomes[str(error)] += 1

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask, number) for number in range(3)]
        try:
            answer = update(router)
        finally:
            over.set()
        for future in asking:
            future.result()
    assert answer.json() == {"updated": 2}
    assert outcomes.keys() == {"whole"} and outcomes["whole"] > 3
    assert not any(process.is_running() for process in old) and len(children(router)) == 2
    assert not names & set(about(router)) and all_ready(router)


def test_replicas_end_with_a_router_that_is_killed(router):
    running = children(router)
    router.process.kill()
    _, alive = psutil.wait_procs(running, HANG)
    assert len(running) == 2 and not alive
