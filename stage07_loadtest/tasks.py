"""Tasks of this stage: what to write, hints, points, and the tests that judge it."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="metrics.py",
        functions=("percentile",),
        title="a percentile that was measured",
        text="Return the nearest rank: the least of the values that at least `percent` percent of "
        "them do not exceed. Values may be infinite. Raise ValueError without values, and for a "
        "percent outside 0 to 100.",
        points=10,
        hints=(
            "Sort them. Of 5 values, the 50th percentile is the 3rd, the 80th the 4th, and the "
            "81st the 5th.",
            "The rank, counted from 1, is percent times the number of values over 100, rounded up.",
            "The 0th percentile is the least value, so the rank is at least 1. Multiply before you "
            "divide: in floating point 0.07 * 100 is more than 7 and would be rounded up to 8.",
        ),
        tests=(
            "tests/test_metrics.py::test_a_percentile_is_the_nearest_rank",
            "tests/test_metrics.py::test_the_99th_percentile_needs_a_thousand_samples",
            "tests/test_metrics.py::test_a_failure_is_an_answer_that_never_came",
        ),
    ),
    Task(
        number=2,
        file="schedule.py",
        functions=("poisson",),
        title="independent arrivals",
        text="Return the schedule of `count` requests at random times, `rate` per second on "
        "average. The gaps between them are exponential, the last one starts at exactly count / "
        "rate, and the same seed gives the same times. Raise ValueError unless rate and count are "
        "positive.",
        points=20,
        hints=(
            "A random.Random of its own, made from the seed, has expovariate; itertools.accumulate "
            "turns gaps into times.",
            "Draw the gaps at rate 1, so that twice the rate is the same pattern in half the time.",
            "The last time is random: scale all times so that it becomes count / rate. The kind is "
            "'poisson', users is None, and the rate is kept.",
        ),
        tests=(
            "tests/test_workload.py::test_the_rate_is_exact_whatever_chance_says",
            "tests/test_workload.py::test_gaps_are_exponential_and_of_the_seed",
        ),
    ),
    Task(
        number=3,
        file="client.py",
        functions=("events",),
        title="a stream that is cut anywhere",
        text="Given the pieces of an answer as they arrived, each with its time, yield the data of "
        "every line that begins with `data:`, stripped, with the time at which the line was "
        "complete. A line may span several pieces, and a piece may hold several lines. Skip other "
        "lines, and an unfinished last line.",
        points=20,
        hints=(
            "The bytes after the last newline of a piece begin a line: keep them for the next "
            "piece.",
            "bytes.split(b'\\n') of what was kept and the piece together: keep the last part, all "
            "others are lines.",
            "The time of a line is that of the piece with its newline. A line may end with b'\\r', "
            "which strip() removes.",
        ),
        tests=(
            "tests/test_client.py::test_a_stream_reads_the_same_wherever_it_is_cut",
            "tests/test_client.py::test_times_are_of_arrival_and_not_of_reading",
        ),
    ),
    Task(
        number=4,
        file="load.py",
        functions=("Run._dispatch",),
        title="the open loop",
        text="Send each of self.asks at its time in `starts`, in seconds on self.clock, whether or "
        "not others have ended; a request is self._one(index, ask, start), and runs as a task of "
        "`group`. No request starts after self.seconds, if that is not None.",
        points=25,
        hints=(
            "A loop over times and asks together: sleep until the time, then send.",
            "How long to sleep follows from self.clock() and the schedule, never from the request "
            "before; if it is already late, do not sleep.",
            "group.create_task starts the request and does not wait for it. Pass `start` as the "
            "intended start, even if it is late.",
        ),
        tests=(
            "tests/test_load.py::test_requests_of_a_burst_and_of_a_trace_start_at_their_times",
            "tests/test_load.py::test_a_load_may_end_by_time",
            "tests/test_ruler.py::test_pitfall_an_open_loop_that_waits_for_answers",
            "tests/test_ruler.py::test_pitfall_latencies_from_the_late_send",
        ),
    ),
    Task(
        number=5,
        file="metrics.py",
        functions=("little",),
        title="Little's law",
        text="From the records: how many requests arrived per second, and how long they stayed on "
        "average, from `sent` to `end`. From the samples (time, requests in flight): how many were "
        "in flight, on average over the time that the samples cover. Return the three as Little; "
        "None if there are too few samples, or if nothing stayed.",
        points=25,
        hints=(
            "Requests that were never sent do not count. Arrivals are those that were, over all "
            "`seconds`.",
            "Each sample is valid until the next one, and the last until `seconds`: weight each by "
            "that time, and divide by the time from the first sample on.",
            "Too few are less than LEAST_SAMPLES, or less than SAMPLES_A_STAY of them in a mean "
            "stay, where seconds over their number is the time between two.",
        ),
        tests=(
            "tests/test_metrics.py::test_littles_law_holds_for_a_load_that_is_not_steady",
            "tests/test_ruler.py::test_littles_law_fails_when_records_lack_requests",
            "tests/test_metrics.py::test_samples_that_came_late_weigh_no_more_than_their_time",
            "tests/test_metrics.py::test_littles_law_is_not_judged_by_few_samples",
        ),
    ),
)
