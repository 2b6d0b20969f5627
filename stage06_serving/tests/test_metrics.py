"""The metrics: exact after a scripted run, under vLLM's names, and with fixed labels. The gauges:
test_inside."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from .asking import ended, get, post, until_idle
from .faulty_server import VARIABLE, Fault

FAMILIES = {  # that vLLM's dashboards ask for
    "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc",
    "counter": "num_preemptions prefix_cache_queries prefix_cache_hits prompt_tokens "
    "generation_tokens request_success admission_rejections",
    "histogram": "iteration_tokens_total time_to_first_token_seconds inter_token_latency_seconds "
    "e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds "
    "request_decode_time_seconds request_prompt_tokens request_generation_tokens",
}
REASONS = {"stop", "length", "abort", "error"}
IDS = list(range(10, 50))  # 40 tokens: two whole blocks and a half


def complete(running, prompt=IDS, status=200, **fields):
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
    answer = post(running, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_the_counters_are_exact(house, tiny_folder, tmp_path):
    fault = Fault(tmp_path / "fault")
    running = house("--model", str(tiny_folder), env={VARIABLE: str(fault.file)})
    before = until_idle(running)
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
    failed = complete(running, [5, 6, 7], max_tokens=4, status=500)
    assert "planted" not in str(failed) and "a planted fault" in running.stderr()
    assert get(running, "/health").status_code == 200
    numbers = until_idle(running)
    assert ended(numbers) == {"length": 5, "stop": 1, "abort": 0, "error": 1}
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


def test_the_names_are_those_of_vllm_and_nothing_of_a_client_becomes_a_label(server):
    """A client could fill the memory with new series, and read what others have asked."""
    word = "a-word-of-the-client"
    fields = {"max_tokens": 2, "user": word, "stop": word, word: word}
    for path, body, status in (
        (f"/v1/completions?{word}", {"prompt": word, **fields}, 200),
        ("/v1/completions", {"prompt": word, "model": word}, 404),
        (f"/{word}", {}, 404),
    ):
        assert post(server, path, json=body, headers={"User-Agent": word}).status_code == status
    answer = get(server, "/metrics")
    kind = answer.headers["content-type"]
    assert kind.startswith("text/plain") and "version=" in kind and word not in answer.text
    families = list(text_string_to_metric_families(answer.text))
    expected = {f"vllm:{name}": kind for kind in FAMILIES for name in FAMILIES[kind].split()}
    assert expected.items() <= {family.name: family.type for family in families}.items()
    labels: dict[str, set[str]] = {}
    for family in families:
        assert family.documentation
        for sample in family.samples:
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    assert labels.keys() == {"model_name", "finished_reason", "le", "status"}
    assert labels["model_name"] == {"stories"} and labels["finished_reason"] == REASONS
    assert len(labels["le"]) < 40 and all(value.isdigit() for value in labels["status"])
