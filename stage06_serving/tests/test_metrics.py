"""Metrics: exact after a scripted run, under vLLM's names, and with fixed labels."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

NAMES = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions"),
    *("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens"),
    *("request_success", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    "e2e_request_latency_seconds",
}
REASONS = ("stop", "length", "abort", "error")
IDS = list(range(10, 50))  # 40 tokens: two whole blocks and a half


def test_the_counters_are_exact(house, tiny_folder):
    def complete(prompt=IDS, status=200, **fields):
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
        answer = running.post(json=body | {"return_token_ids": True})
        assert answer.status_code == status, answer.text
        return answer.json().get("choices", [{}])[0].get("token_ids")

    running = house("--model", str(tiny_folder), "--kv-memory", "1MiB")
    passes = running.gate()
    assert not any(value for name, value in running.numbers().items() if "created" not in name)
    complete(max_tokens=8)
    complete(max_tokens=1)  # its first two blocks are found
    complete([7, 8, 9], n=2, temperature=1, seed=1, max_tokens=5)
    token, *_ = complete([3, 4], max_tokens=6)
    complete([3, 4], max_tokens=6, stop_token_ids=[token])
    complete([3, 4], max_tokens=-1, status=400)
    complete([3, 400], status=400)
    passes.failing = {passes.count + 1}
    complete([5, 6, 7], max_tokens=4, status=500)
    numbers = running.until_idle()
    assert [numbers[reason] for reason in REASONS] == [1, 5, 0, 1]
    answers = [8, 1, 5, 5, 6, 1]  # tokens; the answer that failed has none
    for name, value in {
        "generation_tokens_total": sum(answers),  # without the probe's, after the fault
        "prefix_cache_hits_total": 32,
        # The second of two samples computes the last token of the prompt again.
        "prompt_tokens_total": 40 + (40 - 32) + 3 + 1 + 2 + 2,
        "time_to_first_token_seconds_count": len(answers),
        "inter_token_latency_seconds_count": sum(answers) - len(answers),
        "e2e_request_latency_seconds_count": len(answers) + 1,
    }.items():
        assert numbers[name] == value, name


def test_the_names_are_those_of_vllm_and_nothing_of_a_client_becomes_a_label(server):
    """Otherwise a client could fill the memory with new series, and read what others have asked."""
    word = "a-word-of-the-client"
    fields = {"max_tokens": 2, "user": word, "stop": word, word: word}
    for path, body, status in (
        (f"/v1/completions?{word}", {"prompt": word, **fields}, 200),
        ("/v1/completions", {"prompt": word, "model": word}, 404),
        (f"/{word}", {}, 404),
    ):
        assert server.post(path, json=body, headers={"User-Agent": word}).status_code == status
    answer = server.ask("GET", "/metrics")
    kind = answer.headers["content-type"]
    assert kind.startswith("text/plain") and "version=" in kind and word not in answer.text
    families = list(text_string_to_metric_families(answer.text))
    assert {family.name.removeprefix("vllm:") for family in families} == NAMES
    labels: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    assert labels["model_name"] == {"stories"} and labels["finished_reason"] == {*REASONS}
