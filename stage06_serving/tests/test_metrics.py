"""The numbers for Prometheus: exact after a scripted run, under vLLM's names, and with labels that nobody else chooses."""

from __future__ import annotations

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stage06_serving.tests.faulty_server import VARIABLE, Fault, until

# What vLLM's dashboards ask for, by the names of the families.
NAMES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:admission_rejections": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
}
REASONS = {"stop", "length", "abort", "error"}
IDS = list(range(10, 50))  # 40 tokens: two whole blocks and a half


def families(url):
    return list(
        text_string_to_metric_families(
            httpx2.get(f"{url}/metrics", trust_env=False, timeout=60).text
        )
    )


def complete(running, prompt=IDS, status=200, **fields):
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
    answer = httpx2.post(f"{running.url}/v1/completions", json=body, trust_env=False, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def success(numbers):
    """Ended sequences, by reason."""
    return {
        reason: numbers[f'vllm:request_success_total{{finished_reason="{reason}"}}']
        for reason in sorted(REASONS)
    }


@pytest.fixture(scope="module")
def faulty(house, tiny_folder, tmp_path_factory):
    """A server on the tiny model that takes in three sequences, and its fault."""
    fault = Fault(tmp_path_factory.mktemp("faults") / "fault")
    arguments = ("--model", str(tiny_folder), "--max-sequences", "2", "--max-queue", "1")
    return house(*arguments, env={VARIABLE: str(fault.file)}), fault


def test_the_counters_are_exact(faulty, wait_idle):
    running, fault = faulty
    before = wait_idle(running.url)
    assert not any(
        value
        for name, value in before.items()
        if name.startswith("vllm:") and "_created" not in name
    )
    complete(running, max_tokens=8)
    complete(running, max_tokens=1)  # its first two blocks are found
    complete(running, [7, 8, 9], n=2, temperature=1, seed=1, max_tokens=5)  # computed once
    answer = complete(running, [3, 4], max_tokens=6)
    assert answer["usage"]["completion_tokens"] == 6
    token = complete(running, [3, 4], max_tokens=6, return_token_ids=True)["choices"][0][
        "token_ids"
    ][0]
    assert (
        complete(running, [3, 4], max_tokens=6, stop_token_ids=[token])["choices"][0][
            "finish_reason"
        ]
        == "stop"
    )
    complete(running, [3, 4], max_tokens=-1, status=400)
    complete(running, [3, 400], status=400)
    fault.plant("once")
    complete(running, [5, 6, 7], max_tokens=4, status=500)
    numbers = wait_idle(running.url)
    assert success(numbers) == {"length": 6, "stop": 1, "abort": 0, "error": 1}
    spoke = [8, 1, 5, 5, 6, 6, 1]  # tokens of each answer; the one that failed has none
    assert numbers["vllm:generation_tokens_total"] == sum(
        spoke
    )  # the probe after the fault is not counted
    assert numbers["vllm:prefix_cache_hits_total"] == 32
    # The second sample computes the last token of the prompt again.
    assert numbers["vllm:prompt_tokens_total"] == 40 + (40 - 32) + 3 + 1 + 2 + 2 + 2
    assert numbers["vllm:admission_rejections_total"] == 0
    assert numbers["vllm:num_preemptions_total"] == 0
    assert numbers["vllm:time_to_first_token_seconds_count"] == len(spoke)
    assert numbers["vllm:inter_token_latency_seconds_count"] == sum(spoke) - len(spoke)
    for phase in ("queue", "prefill", "decode"):
        assert numbers[f"vllm:request_{phase}_time_seconds_count"] == len(spoke)
    assert numbers["vllm:e2e_request_latency_seconds_count"] == len(spoke) + 1
    assert numbers["vllm:request_generation_tokens_count"] == len(spoke) + 1
    assert numbers["vllm:request_generation_tokens_sum"] == sum(spoke)
    assert numbers["vllm:request_prompt_tokens_sum"] == 40 + 40 + 3 + 3 + 2 + 2 + 2 + 3
    assert (
        numbers["vllm:iteration_tokens_total_sum"] == (40 + 7) + 8 + (3 + 1 + 2 * 4) + 2 * (2 + 5) + 2
    )


def test_the_gauges_tell_what_is_in_hand(faulty, metrics, wait_idle):
    running, fault = faulty
    before = wait_idle(running.url)
    fault.plant("block")
    with httpx2.Client(trust_env=False, timeout=30) as client:
        body = {"prompt": "a" * 33, "temperature": 0, "ignore_eos": True, "stream": True}
        opened = [
            client.send(
                client.build_request("POST", f"{running.url}/generate", json=body), stream=True
            )
            for _ in range(3)
        ]
        until(lambda: metrics(running.url)["vllm:kv_cache_usage_perc"])
        numbers = metrics(running.url)
        assert (
            numbers["vllm:num_requests_running"] >= 1
        )  # whoever came once the pass had begun waits for the next
        assert numbers["vllm:num_requests_running"] + numbers["vllm:num_requests_waiting"] == 3
        assert 0 < numbers["vllm:kv_cache_usage_perc"] < 1
        complete(running, status=503)
        fault.mend()
        assert all(response.read().endswith(b"data: [DONE]\n\n") for response in opened)
    after = wait_idle(running.url)
    assert after["vllm:admission_rejections_total"] - before["vllm:admission_rejections_total"] == 1
    assert success(after)["length"] - success(before)["length"] == 3


def test_the_names_are_those_of_vllm(server):
    found = {family.name: family.type for family in families(server.url)}
    assert {name: kind for name, kind in found.items() if name in NAMES} == NAMES
    header = httpx2.get(f"{server.url}/metrics", trust_env=False, timeout=60).headers[
        "content-type"
    ]
    assert header.startswith("text/plain") and "version=" in header
    assert all(family.documentation for family in families(server.url))


def test_nothing_that_a_client_writes_becomes_a_label(server):
    """Each new label is a new series for ever: a client could fill the memory with them, and read what others have asked."""
    word = "a-word-of-the-client"
    fields = {"max_tokens": 2, "user": word, "stop": word, word: word}
    with httpx2.Client(
        base_url=server.url, trust_env=False, timeout=30, headers={"User-Agent": word}
    ) as client:
        assert (
            client.post(f"/v1/completions?{word}", json={"prompt": word, **fields}).status_code
            == 200
        )
        assert (
            client.post("/v1/completions", json={"prompt": word, "model": word}).status_code == 404
        )
        assert client.post(f"/{word}", json={}).status_code == 404
        assert word not in client.get("/metrics").text
    labels: dict[str, set[str]] = {}
    for family in families(server.url):
        for sample in family.samples:
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    assert labels.keys() == {"model_name", "finished_reason", "le"}
    assert labels["model_name"] == {"stories"} and labels["finished_reason"] == REASONS
    assert len(labels["le"]) < 40
