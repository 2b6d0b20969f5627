"""The tasks of this stage, for `python -m shared.course.exercise`: what to write, hints, points, and the tests that judge it."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="metrics.py",
        functions=("percentile",),
        title="a percentile that was measured",
        text="Return the nearest rank: the least of the values that `percent` percent of them do not exceed. Some may be "
        "infinite. Raise ValueError if there are no values, or if percent is not between 0 and 100.",
        points=10,
        hints=(
            "Sort them. Of 5 values, the 50th percentile is the 3rd, the 80th the 4th, and the 81st the 5th.",
            "The rank, counted from 1, is percent times their number over 100, rounded up.",
            "The 0th percentile is the least value, so the rank is 1 at least. Multiply before you divide: 0.07 * 100 is more "
            "than 7 to a computer, and is rounded up to 8.",
        ),
        tests=(
            "tests/test_metrics.py::test_a_percentile_is_the_nearest_rank",
            "tests/test_metrics.py::test_a_percentile_may_be_infinite_and_is_never_between_two",
            "tests/test_metrics.py::test_the_99th_percentile_needs_a_thousand_samples",
            "tests/test_metrics.py::test_a_failure_is_an_answer_that_never_came",
        ),
    ),
    Task(
        number=2,
        file="schedule.py",
        functions=("poisson",),
        title="arrivals that do not know of each other",
        text="Return the schedule of `count` requests at random times, `rate` per second on average. The gaps between them are "
        "exponential, the last one starts at count / rate exactly, and the same seed gives the same times. Raise ValueError for "
        "a rate or a count that is no schedule.",
        points=20,
        hints=(
            "A random.Random of its own, made from the seed, has expovariate; itertools.accumulate makes times of gaps.",
            "Draw the gaps at rate 1, so that twice the rate is the same pattern in half the time.",
            "The last time is where chance put it: multiply all times by what brings it to count / rate. The kind is 'poisson', "
            "users is None, and the rate is kept.",
        ),
        tests=(
            "tests/test_schedule.py::test_poisson_arrivals_are_of_the_seed",
            "tests/test_schedule.py::test_the_rate_is_exact_whatever_chance_says",
            "tests/test_schedule.py::test_twice_the_rate_is_the_same_pattern_in_half_the_time",
            "tests/test_schedule.py::test_gaps_are_exponential",
        ),
    ),
    Task(
        number=3,
        file="client.py",
        functions=("events",),
        title="a stream that is cut anywhere",
        text="Given the pieces of an answer as they arrived, each with its time, yield the data of every line that begins with "
        "`data:`, without the spaces around it, with the time at which that line was whole. A line may lie across several "
        "pieces, and a piece may hold several lines. Other lines are passed over, and so is a last one that never ended.",
        points=20,
        hints=(
            "What is behind the last newline of a piece is the beginning of a line: keep it for the next piece.",
            "bytes.split(b'\\n') of what was kept and the piece together: the last part is what to keep, all others are lines.",
            "The time of a line is that of the piece in which its newline came. A line may end with b'\\r', which strip() takes "
            "off.",
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
        text="Send each of self.asks at its time in `starts`, in seconds on self.clock, whatever has become of the others; a "
        "request is self._one(index, ask, start), and runs as a task of `group`. Nobody starts after self.seconds, if that is "
        "not None.",
        points=25,
        hints=(
            "A loop over times and asks together: sleep until it is time, and go on.",
            "How long to sleep follows from self.clock() and the schedule, never from the request before; if it is late "
            "already, do not sleep.",
            "group.create_task starts the request and does not wait for it. `start` goes along as what was intended, even if "
            "it is late.",
        ),
        tests=(
            "tests/test_load.py::test_an_open_loop_does_not_wait_for_answers",
            "tests/test_load.py::test_requests_of_a_burst_and_of_a_trace_start_at_their_times",
            "tests/test_load.py::test_an_open_loop_may_end_by_time",
            "tests/test_ruler.py::test_pitfall_an_open_loop_that_waits_for_answers",
        ),
    ),
    Task(
        number=5,
        file="metrics.py",
        functions=("little",),
        title="Little's law",
        text="From the records: how many requests arrived per second, and how long each stayed, from `sent` to `end`, on "
        "average. From the samples (when, how many): how many were in flight, on average over the time that they cover. Return "
        "the three as Little; None if there are too few samples to judge by, or if nothing stayed.",
        points=25,
        hints=(
            "Requests that were never sent count nowhere. Arrivals are those that were, over all `seconds`.",
            "Each sample holds until the next one, and the last until `seconds`: weigh each by that time, and divide by the time "
            "from the first sample on.",
            "Too few are less than LEAST_SAMPLES, or less than SAMPLES_A_STAY of them in a mean stay, where seconds over their "
            "number is the time between two.",
        ),
        tests=(
            "tests/test_metrics.py::test_littles_law_holds_for_a_load_that_is_not_steady",
            "tests/test_metrics.py::test_littles_law_finds_requests_that_nobody_wrote_down",
            "tests/test_metrics.py::test_samples_that_came_late_weigh_no_more_than_their_time",
            "tests/test_metrics.py::test_littles_law_is_not_judged_by_few_samples",
        ),
    ),
)
