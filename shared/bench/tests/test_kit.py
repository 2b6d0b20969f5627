"""The kit proves before it tells, takes variants in turn, and draws tables from what was
measured."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from shared import measure, roofline
from shared.bench import kit, rows
from shared.bench.claims import FASTER, Claim, closing
from shared.bench.forecast import Part, pass_cost, simulate
from shared.bench.kit import Benchmark, Case, Subject, cases, compare
from shared.bench.tests.tools import LIMITS, lines, measured
from shared.checkpoint import PRESETS, Checkpoint
from shared.peers import transformers_batch
from stage01_forward.engine import Engine as NaiveEngine
from stage02_kv_cache.engine import Engine
from stage04_continuous.scheduler import Scheduler

PLAN = kit.plan(models=("tiny",), dtypes=kit.BOTH)
COLUMNS = {
    "gain (predicted)": rows.gain("naive", lambda row: 2.0 if row.variant == "naive" else 1.0)
}


def speed(subject: Subject, plan: Any) -> Iterable[kit.Group]:
    engines = {"naive": NaiveEngine(subject.model), "cached": Engine(subject.model)}
    yield compare(subject, engines, [(4, 3)] * 2 + [(5, 2)], 2)[0]


BENCHMARK = Benchmark(
    "stage99_test",
    "Measures nothing.",
    PLAN,
    cases(Case(speed)),
    rows.tables(
        COLUMNS, "speed: engine | tok/s | gain (predicted) | same tokens", nothing=lambda _: []
    ),
    {},
    lambda results: f"{len(results.groups('speed'))} groups",
)


@pytest.fixture
def subject(tiny: Checkpoint) -> Subject:
    return Subject(tiny, torch.float32)


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(measure, "REPORTS", tmp_path / "reports")
    monkeypatch.setattr(measure, "limits", lambda *_, **__: LIMITS)
    monkeypatch.setattr(measure, "GIB", 2**20)  # of memory, which a ruler reads
    monkeypatch.setattr(measure, "matmul_rate", lambda *_: 100.0)
    return tmp_path / "reports"


# ---- proof ---------------------------------------------------------------------------------------


def test_a_wrong_token_is_found_and_a_proved_answer_not_run_again(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompts = Engine(subject.model), subject.prompts([3, 4])
    outputs = engine.generate(prompts, kit.greedy(6))
    assert subject.prove(outputs)["tokens"] == 12
    wrong = engine.generate(prompts, kit.greedy(6))
    wrong[1].token_ids[4] = (wrong[1].token_ids[4] + 1) % subject.config.vocab_size
    with pytest.raises(AssertionError, match="below the best"):
        subject.prove(wrong)
    monkeypatch.setattr(subject, "model", None)
    assert subject.prove(outputs)["tokens"] == 12


def test_a_near_tie_is_counted_with_its_gap() -> None:
    scores = torch.tensor([[1.0, 0.9995, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0002, 0.0]])
    proof = kit.prove(scores, torch.tensor([1, 0, 1]), torch.float32)
    assert proof == {"tokens": 3, "near_ties": 1, "widest_gap": pytest.approx(0.0005, rel=1e-3)}
    both = kit.together([proof, proof | {"widest_gap": 0.5}])
    assert both == {"tokens": 6, "near_ties": 2, "widest_gap": 0.5}
    assert kit.together([]) == {"tokens": 0, "near_ties": 0, "widest_gap": 0.0}


def test_nothing_is_written_if_a_token_differs(
    reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Engine.generate

    def generate(self: Engine, prompts: Any, sampling: Any) -> Any:
        outputs = honest(self, prompts, sampling)
        outputs[-1].token_ids[-1] = (outputs[-1].token_ids[-1] + 1) % 101
        return outputs

    monkeypatch.setattr(Engine, "generate", generate)
    with pytest.raises(AssertionError, match="below the best"):
        BENCHMARK.main([])
    assert not reports.exists()


# ---- measuring -----------------------------------------------------------------------------------


def test_engines_run_in_turn_on_the_same_prompts(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, Any]] = []

    class Watched(Engine):
        name = ""

        def generate(self, prompts: Any, sampling: Any) -> Any:
            ran.append((self.name, prompts))
            return super().generate(prompts, sampling)

    engines = {}
    for name in "ABC":
        engines[name] = Watched(subject.model)
        engines[name].name = name
    group, runs = compare(subject, engines, [(4, 3), (4, 3), (2, 5)], {"A": 2, "B": 2, "C": 1})
    assert "".join(name for name, _ in ran) == "ABC" + "ABC" + "BA"  # the first round warms up
    assert all(prompts == ran[3][1] for _, prompts in ran[3:])
    assert [len(taken) for taken in group["seconds"].values()] == [2, 2, 1]
    assert group["lengths"] == [[4, 3, 2], [2, 5, 1]] and group["same"] == dict.fromkeys("ABC", 3)
    assert group["passes"]["A"] == group["busy"]["A"] == 11 and group["rows"]["A"] == [[1, 11]]
    assert group["bytes"]["A"] > 0 and group["proof"]["C"]["tokens"] == 11


def test_transformers_is_compared_and_not_proved(subject: Subject) -> None:
    model = subject.peer("sdpa")
    peer = kit.Peer(lambda prompts, counts: transformers_batch(model, prompts, max(counts)))
    engines = {"ours": Engine(subject.model), "transformers": peer}
    group, _ = compare(subject, engines, [(6, 4)], 1)
    assert list(group["proof"]) == ["ours"] and set(group["same"].values()) == {1}


def test_a_quick_plan_is_a_quarter_of_the_first_model_and_dtype() -> None:
    sizes = {"pairs": ((64, 3), (8, 8)), "turns": {"a": 9}, "seconds": 8.0, "often": True}
    plan = kit.plan(models=("gpt2", "tiny"), dtypes=kit.BOTH, **sizes)
    few: dict[str, Any] = {"models": ("gpt2",), "dtypes": ("float32",), "pairs": ((16, 1), (2, 2))}
    few |= {"turns": {"a": 2}, "seconds": 8.0, "often": False}
    assert vars(kit.quick(plan, often=False)) == few


def test_quick_shows_what_a_full_run_keeps(
    reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BENCHMARK.main(["--quick"])
    out = capsys.readouterr().out
    assert out.startswith("\nlimits\n\n| machine") and out.count("| naive |") == 1
    assert "nothing" not in out  # without a row
    assert not reports.exists()
    BENCHMARK.main([])
    (file,) = reports.glob("*/*.json")
    name = f"reports/{file.parent.name}/stage99_test.json"
    assert f"Written: {name}. Next: python -m reports.draw" in capsys.readouterr().out
    kept = measure.load(file)
    assert kept["kind"] == "stage99_test" and kept["limits"] == vars(LIMITS)
    assert kept["configuration"]["plan"]["dtypes"] == ["float32", "bfloat16"]
    assert [group["dtype"] for group in kept["results"]["speed"]] == ["float32", "bfloat16"]
    assert BENCHMARK.headline(kept) == "2 groups"
    beside = [group["beside"] for group in kept["results"]["speed"]]
    assert all(speeds["before"]["memory"] > 0 for speeds in beside)
    assert "Beside the 2 measurements memory gave" in BENCHMARK.tables(kept)["limits"]


def test_a_share_divides_by_what_the_machine_gave_beside_the_row() -> None:
    speeds = {"memory": 10.0, "float32": 50.0, "bfloat16": 70.0}
    seen = {"before": speeds, "after": speeds | {"memory": 20.0}, "moved": 1.0, "attempts": 3}
    group = {"dtype": "float32", "seconds": {"a": [1.0]}, "beside": seen}
    content = {"configuration": {}, "limits": vars(LIMITS), "results": {"one": [group]}}
    (row,) = rows.Results(content).groups("one")
    assert (row.bandwidth, row.peak) == (15e9, 50e9)
    (row,) = rows.Results(content, LIMITS).groups("one")  # predicted for another machine
    assert (row.bandwidth, row.peak) == (30e9, 100e9)
    (text,) = rows.steadiness(rows.Results(content))
    assert "10 to 20 GB/s" in text and "1 saw" in text and "in 1 it moved" in text


# ---- rows and tables -----------------------------------------------------------------------------


def test_a_table_has_a_line_for_each_variant_and_its_own_numbers() -> None:
    content = measured(BENCHMARK, BENCHMARK.quick)
    (group,) = content["results"]["speed"]
    group["seconds"] = {"naive": [4.0, 6.0, 5.0], "cached": [2.0, 2.0, 2.5]}
    group["proof"]["cached"] |= {"near_ties": 2, "widest_gap": 0.0004}
    text = BENCHMARK.tables(content)["speed"]
    assert text.splitlines()[1] == "|---|--:|--:|---|"  # numbers to the right
    assert lines(text) == [
        ["naive", "1.6 (1.3 to 2.0)", "1.00x (1.00x)", "all 8"],
        ["cached", "4.0 (3.2 to 4.0)", "2.50x (2.00x)", "all 8 but 2 near ties (gap up to 0.0004)"],
    ]


def test_tables_are_declared_by_name_source_and_headings() -> None:
    drawn = rows.tables(
        {"b": "a:.1f", "c": lambda row: row["a"] > 1},
        """
        one: model | dtype
        two < one: model
          | b
        three < chosen: b | c
        """,
        chosen=lambda results: [{"a": 1}, {"a": 2}],
        four=lambda results: [{"x": 1, "y": "z"}],
        five=lambda results: "text",
    )
    one = [{"model": "tiny", "dtype": "float32", "a": 7}]
    about = {"configuration": {}, "limits": vars(LIMITS), "results": {"one": one}}
    assert {name: draw(rows.Results(about)) for name, draw in drawn.items()} == {
        "one": "| model | dtype |\n|---|---|\n| tiny | float32 |",
        "two": "| model | b |\n|---|--:|\n| tiny | 7.0 |",
        "three": "| b | c |\n|--:|---|\n| 1.0 | False |\n| 2.0 | True |",
        "four": "| x | y |\n|--:|---|\n| 1 | z |",
        "five": "text",
    }


def test_what_is_off_the_prediction_by_hand_by_more_than_a_quarter_is_missed() -> None:
    """The prediction by hand is of the round machine, or the lesson's own; beside the verdict
    stands the share of the machine's limit, where the prediction is one."""
    about = {"configuration": {}, "limits": vars(LIMITS), "results": {}}

    def listed(results: rows.Results) -> list[Claim]:
        least = 600 / results.limits.bandwidth_gb_s
        units = ((18.7, "x"), (18.8, "x"), (25.1, "x"), (25.0, "ms"), (16, ""))
        return [Claim("it", least, value, unit, "so") for value, unit in units] + [
            Claim("it", least, 40.0, "tok/s", "so", by_hand=7.0),
            Claim("it", 2.0, 1.0, "ms", "so", aim=True),
            Claim("it", 2.0, 2.1, "ms", "so", aim=True),
        ]

    found = lines(closing(listed)(rows.Results(about)))
    balance = "held here: the machine does 3 operations a byte read, not 5"
    assert [line[1:] for line in found] == [
        ["15.0x", "20.0x", "18.7x", "held", "so"],
        ["15.0x", "20.0x", "18.8x", "**missed**", balance],
        ["15.0x", "20.0x", "25.1x", "**missed**", "so"],
        ["15.0 ms", "20.0 ms", "25.0 ms", "**missed**, 80% of the limit", "so"],
        ["15", "20", "16", "held", "so"],
        ["7.00 tok/s", "20.0 tok/s", "40.0 tok/s", "**missed**, 200% of the limit", FASTER],
        ["2.00 ms", "2.00 ms", "1.00 ms", "held", "so"],
        ["2.00 ms", "2.00 ms", "2.10 ms", "**missed**", "so"],
    ]


def test_lengths_are_packed_and_percentiles_are_measured_values() -> None:
    lengths = [(64, 32)] * 3 + [(5, 2)]
    results = rows.Results({"configuration": {}, "limits": vars(LIMITS), "results": {}})
    row = rows.Row(results, {"lengths": kit.packed(lengths)})
    assert [tuple(pair) for pair in row.lengths] == lengths
    assert (row.requests, row.tokens) == (4, 98)
    assert rows.percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert rows.percentile([1.0] * 98 + [5.0] * 2, 0.99) == 5.0


# ---- predictions ---------------------------------------------------------------------------------


def test_a_packed_pass_reads_the_weights_once_and_each_cache() -> None:
    config, kind = PRESETS["gpt2"], torch.float32
    one, chunk = (roofline.forward_cost(config, kind, *size) for size in ((1, 79), (64, 128, 0)))
    many = pass_cost(config, kind, [Part(row, 79, 1) for row in range(32)])
    assert many.bytes - one.bytes == 31 * 79 * config.kv_bytes_per_token(kind)
    mixed = pass_cost(config, kind, [Part(0, 79, 1), Part(1, 128, 64, False)])
    assert mixed.flops == one.flops + chunk.flops
    assert mixed.bytes == one.bytes + 128 * config.kv_bytes_per_token(kind)


def test_equal_requests_take_the_passes_of_a_static_batch() -> None:
    passes = simulate(Scheduler(4, 4 * 3), [(3, 5)] * 4)
    parts = [[(part.cached, part.count) for part in step] for step in passes]
    assert parts == [[(0, 3)] * 4] + [[(n, 1)] * 4 for n in range(3, 7)]
    static = roofline.static_costs(PRESETS["gpt2"], torch.float32, [(3, 5)] * 4, 4)
    assert static == [pass_cost(PRESETS["gpt2"], torch.float32, step) for step in passes]


def test_arrivals_come_in_their_step() -> None:
    passes = simulate(Scheduler(2, 8), [(0, 2, 6), (3, 4, 1)])
    found = [{part.request for part in step} for step in passes]
    assert found == [{0}] * 3 + [{0, 1}] + [{0}] * 2
