"""The numbers of the lesson follow from its mock server and the formulas, in milliseconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from stage07_loadtest import metrics
from stage07_loadtest.client import Record
from stage07_loadtest.mock import Behaviour

LESSON = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SERVER = Behaviour(ttft=50, itl=0, stall=600, stall_every=1000)  # milliseconds for seconds
END, EVERY = 2000, 200


def answered(intended, sent):
    end = SERVER.due(sent, SERVER.ttft)
    return Record(0, intended, 1, sent=sent, chunks=[end], end=end, completion_tokens=1)


OPEN = [answered(start, start) for start in range(0, END, EVERY)]
USER = [answered(0, 0)]
while USER[-1].end < END:
    USER.append(answered(USER[-1].end, USER[-1].end))
CONNECTION = [answered(0, 0)]  # the schedule, on a connection that carries one request at a time
for start in range(EVERY, END, EVERY):
    CONNECTION.append(answered(start, max(start, CONNECTION[-1].end)))


@pytest.mark.parametrize(
    ("load", "records", "of"),
    [
        ("closed loop, from sending", USER, metrics.e2e),
        ("one connection, from sending", CONNECTION, metrics.e2e),
        ("one connection, from the intended start", CONNECTION, metrics.e2e_intended),
        ("open loop, from the intended start", OPEN, metrics.e2e_intended),
    ],
)
def test_the_table_is_what_the_trace_gives(load, records, of):
    values = [of(record) or 0.0 for record in records]
    percentiles = (f"{metrics.percentile(values, percent):.0f}" for percent in (50, 90))
    slow = 100 * sum(value > 100 for value in values) / len(values)
    cells = [load, str(len(values)), *percentiles, f"{sum(values) / len(values):.1f}"]
    assert f"\n| {' | '.join(cells)} | {slow:.0f} % |\n" in LESSON
