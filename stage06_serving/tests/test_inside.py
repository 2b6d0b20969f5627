"""The application in the process of its tests, without a socket: clients that leave, answers that
are late, passes that fail. A student's copy is tested like this, too.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from itertools import groupby
from typing import Any

import pytest
from fastapi import FastAPI, Request

from shared.course.museum.inside import Asking, Inside
from shared.tokenizer import Tokenizer
from stage01_forward.model import GPT2
from stage06_serving import app, embeddings, service
from stage06_serving.app import unless_gone
from stage06_serving.errors import ApiError
from stage06_serving.formats import Completion, Scores
from stage06_serving.live import MOST_WATCHERS
from stage06_serving.service import Service

from .asking import numbers_of
from .tools import Passes, until

PATH = "/v1/completions"
LONG = {"prompt": "Once upon a time", "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "Once upon a time", "max_tokens": 3, "temperature": 0}
SCORED = SHORT | {"max_tokens": 0, "echo": True, "logprobs": 1}  # the prompt alone


async def idle(inside: Inside) -> None:
    """Wait until no block is owned, which must be long before the end of a LONG answer."""
    await until(lambda: not (inside.engine.requests or inside.engine.scheduler.pool.owned))
    assert len(inside.engine.steps) < 900


async def numbers(inside: Inside, *names: str) -> list[float]:
    """Metrics with these names."""
    found = numbers_of((await inside.ask("/metrics")).body.decode())
    return [found[f"vllm:{name}"] for name in names]


async def watch(inside: Inside) -> tuple[Asking, dict[str, Any]]:
    """Open a page; returns it and its first frame."""
    page = inside.begin("/live")
    await until(lambda: page.heard.body)
    return page, next(page.heard.events())


async def blocked(inside: Inside) -> tuple[Passes, Asking]:
    """A request whose pass waits at this gate."""
    gate = Passes(inside.engine.runner, gate=True)
    asking = inside.begin(PATH, SHORT)
    await until(lambda: gate.count)
    return gate, asking


async def test_an_answer_is_a_stream_only_where_one_was_asked_for():
    async with Inside.serving() as inside:
        for path in (PATH, "/generate"):
            for fields in ({}, {"stream": False}, {"stream": None}):
                answer = await inside.ask(path, SHORT | fields)
                assert answer.headers["content-type"] == "application/json"
                assert answer.json()["usage"]
            answer = await inside.ask(path, SHORT | {"stream": True})
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-cache"
            assert list(answer.events())[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_its_answer_ends_it(stream):
    """The first leaves in mid-answer, the second while queued: it is never served."""
    async with Inside.serving(max_num_seqs=1) as inside:
        clients = [inside.begin(PATH, LONG | {"stream": stream}) for _ in range(2)]
        await inside.passes(5)
        assert await numbers(inside, "num_requests_running", "num_requests_waiting") == [1, 1]
        assert 0 < (await numbers(inside, "kv_cache_usage_perc"))[0] < 1
        for asking in reversed(clients):
            asking.leave()
            await asking.answer()
        await idle(inside)
        served = {each.request_id for step in inside.engine.steps for each in step.sequences}
        assert len(served) == 1


async def test_work_is_cancelled_when_its_client_leaves_and_not_before():
    ended: list[str] = []

    async def work(seconds):
        try:
            await asyncio.sleep(seconds)
            return f"{1 / seconds:g}"
        finally:
            await asyncio.sleep(0.01)
            ended.append("work")

    def asked(gone):
        """A request with a body in two messages, whose client leaves at `gone`."""
        messages: list[Any]
        messages = [{"type": "http.request", "more_body": more} for more in (False, True)]

        async def receive():
            if not messages:
                await gone.wait()
            return messages.pop() if messages else {"type": "http.disconnect"}

        return Request({"type": "http"}, receive)

    async with asyncio.timeout(10):
        assert await unless_gone(asked(asyncio.Event()), work(0.01)) == "100"
        with pytest.raises(ZeroDivisionError):
            await unless_gone(asked(asyncio.Event()), work(0))
        gone = asyncio.Event()
        waiting = asyncio.create_task(unless_gone(asked(gone), work(100)))
        await asyncio.sleep(0.01)
        assert not waiting.done() and ended == ["work"] * 2
        gone.set()
        with pytest.raises(ApiError, match="has disconnected"):
            await waiting
        assert ended == ["work"] * 3  # it has ended by now; nothing is left behind
        assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1}, {"stream": True}])
async def test_a_late_answer_ends_in_the_engine_too(fields):
    async with Inside.serving(request_timeout=0.1) as inside:
        answer = await inside.ask(PATH, LONG | fields)
        if "stream" in fields:  # it must not merely stop
            *_, error, done = answer.events()
            assert (error["error"]["code"], done) == (504, "[DONE]")
        else:
            assert (answer.status, answer.headers["x-should-retry"]) == (504, "false")
        await idle(inside)


@pytest.mark.parametrize("tokens", [0, 1000])
async def test_a_late_echo_is_answered_504(tokens):
    """The prompt is scored before an answer begins, and that time counts."""
    async with Inside.serving(request_timeout=0.1) as inside:
        gate, beside = await blocked(inside)
        body = LONG | SCORED | {"max_tokens": tokens, "stream": True}
        late, waiting = await inside.ask(PATH, body), await beside.answer()
        assert late.status == waiting.status == 504
        assert late.headers["x-should-retry"] == "false"
        gate.allow()
        await idle(inside)


async def test_scoring_that_is_abandoned_is_not_computed(monkeypatch):
    """300 such requests beside a queue of 4 delayed the next answer by two minutes."""
    computed, forward = [], GPT2.forward

    def counted(model, ids, *arguments):
        computed.append(len(ids))
        return forward(model, ids, *arguments)

    monkeypatch.setattr(GPT2, "forward", counted)
    body = SCORED | {"prompt": "a " * 300, "stream": True}
    async with Inside.serving(max_num_seqs=2, max_queue=3) as inside:
        gate, running = await blocked(inside)
        for _ in range(5):
            clients = [inside.begin(PATH, body) for _ in range(4)]
            await asyncio.sleep(0.02)
            for client in clients:
                client.leave()
                await client.answer()
        gate.allow()
        assert (await running.answer()).status == 200
        assert (await inside.ask(PATH, SHORT)).status == 200
        await idle(inside)
    assert sum(computed) < 100


@pytest.fixture
def encoding(monkeypatch):
    """Texts being tokenized by a server that is up, and the gate that lets them pass."""
    running: list[str] = []
    gate, encode = threading.Event(), Tokenizer.encode

    def watched(tokenizer, text):
        running.append(text)
        gate.wait(10)
        ids = encode(tokenizer, text)
        running.remove(text)
        return ids

    yield lambda: monkeypatch.setattr(Tokenizer, "encode", watched), running, gate


@pytest.mark.parametrize("how", ["leave", "shutdown"])
async def test_many_texts_are_not_tokenized_to_the_end_for_nobody(encoding, how):
    """A hundred clients with a thousand texts each left, and Ctrl-C showed tracebacks of them."""
    watch, running, gate = encoding
    async with Inside.serving() as inside:
        watch()
        asking = inside.begin(PATH, {"prompt": ["word " * 900] * 40})
        await until(lambda: running)
        if how == "leave":
            asking.leave()
        else:
            asking._task.cancel()
        heard = await asking.answer()
        gate.set()
        assert heard.status == (None if how == "leave" else 503) and len(running) <= 1


async def test_long_texts_are_tokenized_one_at_a_time_and_few_wait(encoding, monkeypatch):
    """40 of a megabyte at once held the event loop for two seconds."""
    watch, running, gate = encoding
    monkeypatch.setattr(service, "MOST_TEXTS", 4)
    text = "Once upon a time there was a fox. " * 600
    async with Inside.serving() as inside:
        ids = inside.app.state.service.loaded.tokenizer.encode(text)
        watch()
        body = {"prompt": text, "return_token_strs": True}
        clients = [inside.begin("/tokenize", body) for _ in range(6)]
        await until(lambda: sum(client.heard.status == 503 for client in clients) == 2)
        assert running == [text]
        clients[3].leave()  # it leaves the queue too
        assert (await clients[3].answer()).status != 200
        later = inside.begin("/tokenize", {"prompt": text})
        gate.set()
        answers = [await client.answer() for client in (*clients, later)]
    assert [answer.status for answer in answers].count(200) == 4
    answer = answers[0].json()
    assert len(ids) > service.PART and answer["tokens"] == ids
    assert "".join(answer["token_strs"]) == text and answer["count"] == len(ids)
    assert "token_strs" not in answers[-1].json()


def noting_threads():
    """A list, and a decorator of functions whose calls note in it whether they block the loop."""
    main = threading.main_thread()
    places: list[bool] = []

    def watched(function):
        def noted(*arguments):
            places.append(threading.current_thread() is main)
            return function(*arguments)

        return noted

    return places, watched


async def test_long_texts_and_bodies_are_read_off_the_event_loop(monkeypatch):
    """25,000 parts of a chat held it for 0.1 s, 100,000 ids for 40 ms, and a body of 250,000 lists
    at /v1/embeddings for 0.6 s."""
    places, watched = noting_threads()
    for owner, name in ((app, "parse"), (Tokenizer, "decode"), (Tokenizer, "encode")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    text, parts = "1 " * 20_000, [{"type": "text", "text": "a"}] * 1000
    chat = {"messages": [{"role": "user", "content": parts}] * 25}
    async with Inside.serving() as inside:
        for path, body, calls in (
            ("/tokenize", {"prompt": text}, 2),
            (PATH, {"prompt": text}, 2),
            (PATH, {"prompt": [text[:1000]] * 20, "max_tokens": 1}, 21),
            ("/v1/chat/completions", chat, 1),  # there is no template
            ("/detokenize", {"tokens": [5] * 20_000}, 2),
            ("/v1/embeddings", {"input": [[]] * 20_000}, 1),
        ):
            answer = await inside.ask(path, body)
            assert places == [False] * calls, path
            places.clear()
    assert "a list of at most 1024 of either" in answer.json()["error"]["message"]


async def test_long_answers_are_formatted_off_the_event_loop(monkeypatch):
    """The log-probabilities that one body may have held it for half a second: those of an answer,
    and those of its prompts. So did a first look at the schema."""
    places, watched = noting_threads()
    for owner, name in (
        *((Completion, "whole"), (Scores, "whole"), (Tokenizer, "decode")),
        *((base64, "b64encode"), (embeddings, "ranking"), (FastAPI, "openapi")),
    ):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    long = SHORT | {"prompt": ["a"] * 40, "max_tokens": 8, "ignore_eos": True}
    async with Inside.serving() as inside:
        answer = await inside.ask(PATH, long)
        assert answer.json()["usage"]["completion_tokens"] == 320
        await inside.ask("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"})
        await inside.ask("/v1/rerank", {"query": "a", "documents": ["b"]})
        assert (await inside.ask("/openapi.json")).json()["paths"]
        assert places == [False] * 5
        places.clear()
        for fields in ({}, {"max_tokens": 1}):  # the prompt is decoded, and the answer is written
            assert (await inside.ask(PATH, SCORED | {"prompt": [5, 6]} | fields)).status == 200
    assert places == [False] * 4


async def test_the_loop_answers_while_the_engine_computes():
    """/health answers, and refusals go out: a prompt being scored takes up a place, too."""
    async with Inside.serving(max_num_seqs=2, max_queue=3) as inside:
        gate, running = await blocked(inside)
        bodies = [SCORED | {"stream": number % 2 == 0} for number in range(7)]
        clients = [running, *(inside.begin(PATH, body) for body in bodies)]
        await until(lambda: sum(client.heard.status is not None for client in clients) == 3)
        for body in (SCORED, SHORT):
            refused = await inside.ask(PATH, body)
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert (await inside.ask("/health")).json() == {"status": "ok"}
        assert await numbers(inside, "admission_rejections_total") == [5]
        gate.allow()
        statuses = [(await client.answer()).status for client in clients]
        assert sorted(statuses, key=str) == [200] * 5 + [503] * 3


async def test_a_reader_that_stands_still_is_cut_off_and_ends_its_answer(monkeypatch):
    """The connection cuts it off, in the middle of a `send`."""

    async def full(asking, message):
        """Behaves like a socket whose other end does not read."""
        if message["type"] == "http.response.body":
            await asking._gone.wait()

    monkeypatch.setattr(Asking, "_send", full)
    async with Inside.serving() as inside:
        asking = inside.begin(PATH, LONG | {"stream": True})
        await inside.passes(5)
        asking.leave()
        await asking.answer()
        await idle(inside)


async def test_the_number_of_watching_pages_is_limited():
    """100 clients at /live kept the loop busy."""
    async with Inside.serving() as inside:
        watching = [(await watch(inside))[0] for _ in range(MOST_WATCHERS)]
        refused = await inside.ask("/live")
        assert refused.status == 503 and refused.headers["retry-after"]
        assert "watch" in refused.json()["error"]["message"]
        watching[0].leave()
        await watching[0].answer()
        watching[0], _ = await watch(inside)  # there is room again
        for page in watching:
            page.leave()
            await page.answer()


async def test_the_first_frame_is_true_though_no_page_was_open():
    """Its map has the blocks that stay in the prefix cache, and its steps include earlier ones."""

    def seen():
        return [step["number"] for frame in early.heard.events() for step in frame["steps"]]

    async with Inside.serving(kv_memory="1MiB") as inside:
        early, first = await watch(inside)
        await inside.ask(PATH, LONG | {"max_tokens": 40})
        await idle(inside)
        late, frame = await watch(inside)
        await until(lambda: len(seen()) >= 40)
        assert seen() == [*range(1, 41)] and first["step"] == 0  # each step once
        states = [state for state, _ in frame["map"]]
        cached, free = (sum(n for one, n in frame["map"] if one == state) for state in (-2, -1))
        assert cached >= 40 // 16 and cached + free == frame["blocks"]
        assert states == [state for state, _ in groupby(states)]  # runs
        assert frame["running"] == [] and frame["waiting"] == 0 and frame["alive"]
        rows = [step["rows"][0][1:] for step in frame["steps"]]
        assert len(rows) == 40 == frame["step"] and (rows[0], rows[-1]) == ([4, 0], [0, 1])
        for page in (early, late):
            page.leave()
            await page.answer()


async def test_a_dead_engine_is_reported_and_can_be_stopped():
    """A supervisor looks at /health: only a restart helps."""
    async with Inside.serving() as inside:  # which gives up after a while
        Passes(inside.engine.runner, {1}, SystemExit())
        assert (await inside.ask(PATH, SHORT)).status == 503
        for body in (SHORT, SHORT | {"stream": True}, SCORED):
            answer = await inside.ask(PATH, body)
            assert answer.status == 503 and "restart" in answer.json()["error"]["message"]
        assert (await inside.ask("/health")).status == 503


@pytest.mark.parametrize(("fault", "status"), [(None, 500), (SystemExit(), 503)])
async def test_a_stream_that_fails_has_an_error_event(fault, status):
    """The official client takes a stream that merely stops for a complete answer."""
    async with Inside.serving() as inside:
        Passes(inside.engine.runner, {5}, fault)
        answer = await inside.ask(PATH, LONG | {"stream": True})
    *chunks, error, done = answer.events()
    assert done == "[DONE]" and error["error"]["code"] == status and error["error"]["message"]
    assert chunks and all("choices" in each for each in chunks)


async def test_an_event_is_one_line_for_every_client():
    """U+2028 and U+0085 end a line too, for clients that split text as Python does."""
    prompt = "a\u2028b\u2029c\u0085d"
    async with Inside.serving() as inside:
        answer = await inside.ask(PATH, SHORT | {"prompt": prompt, "echo": True, "stream": True})
    assert next(answer.events())["choices"][0]["text"].startswith(prompt)
    assert all(line[:6] in ("", "data: ") for line in answer.body.decode().splitlines())


async def test_the_text_of_an_unexpected_error_is_logged_and_not_sent(monkeypatch, caplog):
    async def fail(*arguments):
        raise RuntimeError("a planted fault")

    monkeypatch.setattr(Service, "all_prompt_ids", fail)
    async with Inside.serving() as inside:
        heard = await inside.ask(PATH, SCORED)
        assert "a planted fault" in caplog.text
        assert heard.status == 500 and b"planted" not in heard.body and b"its log" in heard.body


async def test_only_the_engines_thread_touches_scheduler_pool_and_cache():
    """Metrics, page and admission read statuses and settings. Every other access is noted here."""
    touched: list[str] = []
    settings = {"check", "config", "scheduler", "chunked", "token_budget", "pool", "longest"}
    settings |= {"count", "block_size", "blocks_for"}

    def guard(thing: Any) -> None:
        kind = type(thing)

        class Guarded(kind):  # type: ignore[misc, valid-type]
            def __getattribute__(self, name: str) -> Any:
                if threading.current_thread().name != "engine" and name not in settings:
                    touched.append(f"{kind.__name__}.{name}")
                return super().__getattribute__(name)

        thing.__class__ = Guarded

    async with Inside.serving(kv_memory="4MiB") as inside:
        runner, scheduler = inside.engine.runner, inside.engine.scheduler
        for thing in (runner.runner.cache, scheduler.pool, scheduler, runner, inside.engine):
            guard(thing)
        stream = inside.begin(PATH, LONG | {"max_tokens": 600})
        page = inside.begin("/live")
        await until(lambda: b'"running":[["sequence-1",0]' in page.heard.body)
        sampled = {"n": 2, "temperature": 1, "echo": True, "logprobs": 2, "stream": True}
        long = {"prompt": "a " * 300}
        for fields in (sampled, SCORED, long, {"max_tokens": 10**6}, {"stop": "e"}):
            status = (await inside.ask(PATH, SHORT | fields)).status
            assert status == (400 if fields == {"max_tokens": 10**6} else 200)
        for path in ("/metrics", "/health", "/v1/models", "/version", "/"):
            assert (await inside.ask(path)).status == 200
        stream.leave()
        await stream.answer()
        await until(lambda: b'"running":[]' in page.heard.body.splitlines()[-2])
        page.leave()
        await page.answer()
        assert not touched, touched
        assert inside.engine and scheduler.running == []  # the guards work:
        assert touched == ["Scheduler.running"]
