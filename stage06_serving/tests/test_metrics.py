"""The metrics: exact after a scripted run, under vLLM's names, and with fixed labels."""

from __future__ import annotations

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stage06_serving.tests.crowd import ended
from stage06_serving.tests.faulty_server import until

# The families that vLLM's dashboards ask for.
GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
COUNTERS = """num_preemptions prefix_cache_queries prefix_cache_hits prompt_tokens generation_tokens
    request_success admission_rejections"""
HISTOGRAMS = """iteration_tokens_total time_to_first_token_seconds inter_token_latency_seconds
    e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds
    request_decode_time_seconds request_prompt_tokens request_generation_tokens"""
REASONS = {"stop", "length", "abort", "error"}
IDS = list(range(10, 50))  # 40 tokens: two whole blocks and a half


def families(url):
    text = httpx2.get(f"{url}/metrics", trust_env=False, timeout=60).text
    return list(text_string_to_metric_families(text))


def complete(running, prompt=IDS, status=200, **fields):
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
    answer = httpx2.post(f"{running.url}/v1/completions", json=body, trust_env=False, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def success(numbers):
    return {reason: ended(numbers, reason) for reason in REASONS}


@pytest.fixture(scope="module")
def faulty(lodge):
    """A server on the tiny model that accepts three sequences, and its fault."""
    return lodge("--max-sequences 2 --max-queue 1")


def test_the_counters_are_exact(faulty, wait_idle):
    running, fault = faulty
    before = wait_idle(running.url)
    names = [name for name in before if name.startswith("vllm:") and "_created" not in name]
    assert names and not any(before[name] for name in names)
    complete(running, max_tokens=8)
    complete(running, max_tokens=1)  # its first two blocks are found
    complete(running, [7, 8, 9], n=2, temperature=1, seed=1, max_tokens=5)
    answer = complete(running, [3, 4], max_tokens=6, return_token_ids=True)
    assert answer["usage"]["completion_tokens"] == 6
    token = answer["choices"][0]["token_ids"][0]
    answer = complete(running, [3, 4], max_tokens=6, stop_token_ids=[token])
    assert answer["choices"][0]["finish_reason"] == "stop"
    complete(running, [3, 4], max_tokens=-1, status=400)
    complete(running, [3, 400], status=400)
    fault.plant("once")
    complete(running, [5, 6, 7], max_tokens=4, status=500)
    numbers = wait_idle(running.url)
    assert success(numbers) == {"length": 5, "stop": 1, "abort": 0, "error": 1}
    answers = [8, 1, 5, 5, 6, 1]  # tokens; the answer that failed has none
    # The probe after the fault is not counted.
    computed = (40 + 7) + 8 + (3 + 1 + 2 * 4) + (2 + 5) + 2
    for name, value in {
        "generation_tokens_total": sum(answers),
        "prefix_cache_hits_total": 32,
        # The second of two samples computes the last token of the prompt again.
        "prompt_tokens_total": 40 + (40 - 32) + 3 + 1 + 2 + 2,
        "iteration_tokens_total_sum": computed,
        "admission_rejections_total": 0,
        "num_preemptions_total": 0,
        "time_to_first_token_seconds_count": len(answers),
        "inter_token_latency_seconds_count": sum(answers) - len(answers),
        "request_queue_time_seconds_count": len(answers),
        "request_prefill_time_seconds_count": len(answers),
        "request_decode_time_seconds_count": len(answers),
        "e2e_request_latency_seconds_count": len(answers) + 1,
        "request_generation_tokens_count": len(answers) + 1,
        "request_generation_tokens_sum": sum(answers),
        "request_prompt_tokens_sum": 40 + 40 + 3 + 3 + 2 + 2 + 3,
    }.items():
        assert numbers[f"vllm:{name}"] == value, name


def test_the_gauges_count_requests_in_flight(faulty, metrics, wait_idle):
    running, fault = faulty
    before = wait_idle(running.url)
    fault.plant("block")
    with httpx2.Client(base_url=running.url, trust_env=False, timeout=30) as client:
        body = {"prompt": "a" * 33, "temperature": 0, "ignore_eos": True, "stream": True}
        requests = [client.build_request("POST", "/generate", json=body) for _ in range(3)]
        opened = [client.send(request, stream=True) for request in requests]
        until(lambda: metrics(running.url)["vllm:kv_cache_usage_perc"])
        running_now, waiting, usage = (metrics(running.url)[f"vllm:{name}"] for name in GAUGES)
        assert running_now >= 1  # a request that arrived during the pass waits for the next
        assert running_now + waiting == 3 and 0 < usage < 1
        complete(running, status=503)
        fault.mend()
        assert all(response.read().endswith(b"data: [DONE]\n\n") for response in opened)
    after, rejections = wait_idle(running.url), "vllm:admission_rejections_total"
    assert after[rejections] - before[rejections] == 1
    assert success(after)["length"] - success(before)["length"] == 3


def test_the_names_are_those_of_vllm(server):
    kinds = {"gauge": GAUGES, "counter": COUNTERS.split(), "histogram": HISTOGRAMS.split()}
    expected = {f"vllm:{name}": kind for kind, names in kinds.items() for name in names}
    served = {family.name: family.type for family in families(server.url)}
    assert expected.items() <= served.items()
    answer = httpx2.get(f"{server.url}/metrics", trust_env=False, timeout=60)
    kind = answer.headers["content-type"]
    assert kind.startswith("text/plain") and "version=" in kind
    assert all(family.documentation for family in families(server.url))


def test_nothing_that_a_client_sends_becomes_a_label(server):
    """A client could fill the memory with new series, and read what others have asked."""
    word = "a-word-of-the-client"
    fields = {"max_tokens": 2, "user": word, "stop": word, word: word}
    options = {"base_url": server.url, "headers": {"User-Agent": word}}
    with httpx2.Client(**options, trust_env=False, timeout=30) as client:
        for path, body, status in (
            (f"/v1/completions?{word}", {"prompt": word, **fields}, 200),
            ("/v1/completions", {"prompt": word, "model": word}, 404),
            (f"/{word}", {}, 404),
        ):
            assert client.post(path, json=body).status_code == status
        assert word not in client.get("/metrics").text
    labels: dict[str, set[str]] = {}
    for family in families(server.url):
        for sample in family.samples:
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    assert labels.keys() == {"model_name", "finished_reason", "le", "status"}
    assert labels["model_name"] == {"stories"} and labels["finished_reason"] == REASONS
    assert len(labels["le"]) < 40 and all(value.isdigit() for value in labels["status"])
