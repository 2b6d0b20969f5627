"""Tasks of this stage: what to write, hints, points, and the tests that judge it."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="metrics.py",
        functions=("percentile", "distribution", "_percentiles", "latencies"),
        title="percentiles, with failures",
        text="percentile: the nearest rank, the smallest value that at least `percent` % of the "
        "values do not exceed; ValueError without values, and for a percent outside 0 to 100. "
        "distribution: summarize values; in the adjusted percentiles each failure is infinite. "
        "latencies: a distribution for each of PER_REQUEST, for ITL and for CLIENT_QUEUE.",
        points=20,
        hints=(
            "Of 5 values, the 50th percentile is the 3rd, the 80th the 4th, and the 81st the 5th. "
            "The rank, counted from 1, is percent times the number of values, divided by 100, "
            "rounded up, and at least 1. Multiply before you divide: in floating point 0.07 * 100 "
            "is over 7.",
            "_percentiles takes PERCENTILES of sorted values; p99 is None for fewer than "
            "P99_SAMPLES. Infinity is a value like any other: append one for each failure.",
            "Only requests that succeeded have latencies. Those of PER_REQUEST count failures; ITL "
            "and CLIENT_QUEUE get None for them, and the queue covers all records. Only names in "
            "DRAWN have a curve. Leave out a latency without values.",
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
        "average. The gaps between them are exponential, the last request starts at exactly count "
        "/ rate, and the same seed gives the same times. Raise ValueError unless rate and count "
        "are positive.",
        points=10,
        hints=(
            "A new random.Random, made from the seed, has expovariate; itertools.accumulate turns "
            "gaps into times.",
            "Draw the gaps at rate 1, so that twice the rate is the same pattern in half the time.",
            "The last time is random: by what are all times multiplied, so that it becomes count "
            "/ rate? The kind is 'poisson', users is None, and the rate is kept.",
        ),
        tests=(
            "tests/test_workload.py::test_the_rate_is_exact_whatever_chance_says",
            "tests/test_workload.py::test_gaps_are_exponential_and_of_the_seed",
        ),
    ),
    Task(
        number=3,
        file="client.py",
        functions=("events", "_take"),
        title="a stream cut anywhere",
        text="events: given the pieces of an answer, each with its time of arrival, yield the data "
        "of every line that begins with `data:`, stripped, with the time at which the line was "
        "complete. A line may span pieces, and a piece may hold several lines. Skip other lines, "
        "and an unfinished last one. _take: add one event to the record, or return the message of "
        "an error event.",
        points=20,
        hints=(
            "The bytes after the last newline of a piece begin a line: keep them, and split them "
            "together with the next piece. A line's time is that of the piece with its newline.",
            "An event may have `usage`, with prompt_tokens and completion_tokens; the last one "
            "counts. Of `choices`, take the first, if there is one.",
            "A choice with tokens, text or a finish reason is a chunk: its time goes to "
            "record.chunks, its tokens to chunk_tokens. Count them by token_ids, else by "
            "logprobs['tokens'], else 1 for a text and 0 for none. A finish reason, once set, "
            "stays.",
        ),
        tests=(
            "tests/test_client.py::test_a_stream_reads_the_same_wherever_it_is_cut",
            "tests/test_client.py::test_times_are_of_arrival_and_not_of_reading",
            "tests/test_client.py::test_tokens_of_a_chunk_by_ids_or_logprobs_or_else_one",
        ),
    ),
    Task(
        number=4,
        file="load.py",
        functions=("Run._user", "Run._dispatch"),
        title="the closed and the open loop",
        text="_user: take (index, ask) from `turns`, and send each when the previous answer has "
        "ended; that moment is its intended start. _dispatch: send each of self.asks at its time "
        "in `starts`, in seconds on self.clock, whether or not earlier ones have ended. "
        "self._one(index, ask, start) sends a request. If self.seconds is not None, no request "
        "starts after it.",
        points=15,
        hints=(
            "_one returns the record, which knows its end. A user's first request is intended for "
            "0.",
            "_dispatch loops over times and asks together. How long to sleep follows from "
            "self.clock() and the schedule, never from the previous request; if a request is "
            "already late, do not sleep.",
            "group.create_task starts the request and does not wait for it. What is the intended "
            "start of one that is late: its time in the schedule, or now?",
        ),
        tests=(
            "tests/test_load.py::test_a_closed_loop_has_as_many_requests_in_hand_as_users",
            "tests/test_load.py::test_a_user_sends_when_the_last_answer_has_ended",
            "tests/test_load.py::test_requests_of_a_burst_and_of_a_trace_start_at_their_times",
            "tests/test_load.py::test_a_load_may_end_by_time",
            "tests/test_ruler.py::test_pitfall_an_open_loop_that_waits_for_answers",
            "tests/test_ruler.py::test_pitfall_latencies_from_the_late_send",
        ),
    ),
    Task(
        number=5,
        file="metrics.py",
        functions=("little", "steady"),
        title="Little's law, and the steady part",
        text="little: from the records, how many requests arrived per second and how long they "
        "stayed on average, from `sent` to `end`; from the samples (time, requests in flight), how "
        "many were in flight on average over the time that they cover. Return None for too few "
        "samples. steady: return the part at full load, and the tokens per second that arrived in "
        "it.",
        points=15,
        hints=(
            "Requests that were never sent do not count. The arrival rate is the number of those "
            "that were, over all `seconds`.",
            "Each sample is valid until the next one, and the last until `seconds`: weight each by "
            "that time. Too few means fewer than LEAST_SAMPLES, or fewer than SAMPLES_A_STAY in a "
            "mean stay; `seconds` over the number of samples is the time between two.",
            "steady begins when as many requests as users have been sent, or in an open loop when "
            "the first has ended; it ends when the last is sent. _arrivals has the tokens.",
        ),
        tests=(
            "tests/test_metrics.py::test_littles_law_holds_for_a_load_that_is_not_steady",
            "tests/test_ruler.py::test_littles_law_fails_when_records_lack_requests",
            "tests/test_metrics.py::test_samples_that_came_late_weigh_no_more_than_their_time",
            "tests/test_metrics.py::test_littles_law_is_not_judged_by_few_samples",
            "tests/test_metrics.py::"
            "test_the_steady_part_begins_when_all_users_have_sent_and_ends_with_the_last_request",
        ),
    ),
    Task(
        number=6,
        file="metrics.py",
        functions=("tpot", "itl", "meets", "goodput"),
        title="TPOT, ITL and goodput",
        text="tpot: the mean time per token after the first, one number per request; None without "
        "a second token. itl: every gap between two chunks. meets: whether a request succeeded "
        "within every limit of `slo`, from its intended start. goodput: such requests per second.",
        points=20,
        hints=(
            "A chunk may hold several tokens: TPOT counts them by record.completion_tokens, and "
            "ITL does not count them at all.",
            "A limit that is None is met, and so is one on a latency that the request does not "
            "have. A latency may equal its limit.",
            "slo has limits for ttft, tpot and e2e. Which of the three latencies depend on when a "
            "request should have started, and which properties of the record count from there?",
        ),
        tests=(
            "tests/test_metrics.py::test_latencies_count_from_sending_and_from_the_intended_start",
            "tests/test_metrics.py::"
            "test_goodput_counts_what_meets_every_limit_from_the_intended_start",
        ),
    ),
)
