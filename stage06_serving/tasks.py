"""The tasks of this stage for `python -m shared.course.exercise`: what to write, hints, points, and
the tests that judge it."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="text.py",
        functions=("overlap",),
        title="the beginning of a stop string",
        text="How many characters at the end of `text` may be the beginning of `stop`? A whole "
        "stop string does not count as a beginning.",
        points=5,
        hints=(
            "The answer is at most len(stop) - 1, and at most the length of the text.",
            "Try the longest first: does the text end with that much of the stop string?",
            "Which length is tried first, and what is the answer if none fits?",
        ),
        tests=(
            "tests/test_text.py::test_overlap",
            "tests/test_text.py::"
            "test_nothing_of_a_stop_string_leaks_and_no_more_is_held_back_than_needed",
        ),
    ),
    Task(
        number=2,
        file="text.py",
        functions=("TextStream._release",),
        title="hold back and release",
        text="Given the new characters, return the text that may be shown now. If a stop string is "
        "complete, the text ends there: self.stop is set, and nothing follows. If the end may be "
        "the beginning of a stop string, hold exactly that much back in self._held.",
        points=15,
        hints=(
            "Search in the held text and the new text together: a stop string may span both.",
            "Of several stop strings, the first to be completed wins; of those that end at the "
            "same place, the longest. With keep_stop, the stop string belongs to the text.",
            "If two matches end at the same place, which one begins first? Without a match, which "
            "of the stop strings decides how much is held back? And without stop strings, what is "
            "there to wait for?",
        ),
        tests=(
            "tests/test_text.py::test_stop_strings_end_the_text_wherever_the_tokens_are_cut",
            "tests/test_text.py::test_stop_strings_by_hand",
        ),
    ),
    Task(
        number=3,
        file="async_engine.py",
        functions=("AsyncEngine.submit",),
        title="submit prompts, all or none",
        text="Accept some prompts, with one sample of each prompt for each of the sampling "
        "options, and return the tickets, one list per prompt. All or none: refuse a request that "
        "can never be answered, or finds no room, before you accept anything. The engine changes "
        "only through a command to its thread.",
        points=15,
        hints=(
            "Three checks first: is the engine alive, can each sample ever be answered "
            "(self._engine.check reads constant settings), is there room for all?",
            "Then make the tickets, which share one event, enter them in self.in_flight by id, and "
            "send one command per prompt, so that its samples arrive together.",
            "The command is self._add with the prompt, the options, the salt and the tickets' ids: "
            "partial makes it a function for the thread to call later.",
        ),
        tests=(
            "tests/test_async_engine.py::test_samples_of_a_prompt_share_its_blocks",
            "tests/test_async_engine.py::test_capacity_is_counted_in_sequences",
            "tests/test_async_engine.py::test_a_request_that_can_never_be_answered_takes_no_place",
        ),
    ),
    Task(
        number=4,
        file="writer.py",
        functions=("Stream.news", "Stream._send", "Stream._wait"),
        title="write the tokens of a step",
        text="`news` runs on the event loop after a step with tokens for this stream: read the "
        "events and hand them to the connection at once. `_send` is the stream's task: it begins "
        "the answer, sends what the writer cannot, and ends it. `_wait` returns when the task has "
        "something to do. No byte may be lost, doubled or overtaken, however slowly a client "
        "reads.",
        points=20,
        hints=(
            "news may write only while the task waits (self._waiting); else it would overtake the "
            "task. If the events have ended, or self._write refuses their bytes, keep the bytes in "
            "self._unsent, set self._waiting to False and wake the task.",
            "_send sends START, sets the news of all tickets, and then takes turns: if there are "
            "bytes, from the writer or newly read, send them, else wait. While it sends, further "
            "tokens arrive unannounced: read again before each wait.",
            "_wait clears the event, lets the writer write, and waits until the deadline. A "
            "TimeoutError becomes the bytes of self.events.fail(error), and DONE.",
        ),
        tests=(
            "tests/test_writer.py::test_the_tokens_of_a_step_are_written_at_once",
            "tests/test_writer.py::test_a_stream_gathers_tokens_over_the_interval",
            "tests/test_writer.py::test_a_client_reads_the_same_however_it_reads",
            "tests/test_inside.py::test_a_late_answer_ends_in_the_engine_too",
        ),
    ),
    Task(
        number=5,
        file="async_engine.py",
        functions=(
            "AsyncEngine._run",
            "AsyncEngine._obey",
            "AsyncEngine._deliver",
            "AsyncEngine._announce",
            "AsyncEngine.abort",
            "AsyncEngine._abort",
        ),
        title="the engine's thread",
        text="Write the thread's loop: run all commands (_obey), make a step, send it to the event "
        "loop in one call of _deliver, and repeat. If a step raises, only its requests end, with "
        "BROKEN; a PROBE shows whether steps work again, and FAILURES failed steps in a row end "
        "the loop. _deliver gives each ticket its tokens and its end, calls the listeners, then "
        "sets the times of its tokens, and has _announce call the readers. `abort` sends the "
        "command _abort, which ends a sequence in the engine.",
        points=30,
        hints=(
            "queue.SimpleQueue.get(block=...) waits for a command only while self._idle(). A "
            "command's `reply` takes its result and its error; None in the queue ends the thread. "
            "The only way into the event loop is self._loop.call_soon_threadsafe.",
            "After an error: log it, self._engine.fail(UserError(BROKEN)), and report "
            "Step(ended=self._ended()). The probe is a Request for one token; add it if it is not "
            "there yet. A step that works resets the count of failures.",
            "_deliver ignores names that are not in self.in_flight. Tokens first, then "
            "ticket.scheduled from step.record, then self._end, then the listeners, and only then "
            "first_token and last_token. Each ticket.news goes into self._news, whose first entry "
            "schedules _announce with call_soon. _abort must report what ended if the thread is "
            "idle, because no step will.",
        ),
        tests=(
            "tests/test_async_engine.py::"
            "test_each_step_is_one_message_with_its_tokens_and_its_ends",
            "tests/test_async_engine.py::test_an_abort_is_heard_within_two_steps",
            "tests/test_async_engine.py::"
            "test_the_end_of_the_last_request_is_reported_without_a_step",
            "tests/test_async_engine.py::test_a_call_is_made_on_the_thread_between_two_steps",
            "tests/test_async_engine.py::test_requests_that_outlast_the_grace_end_with_an_error",
            "tests/test_async_engine.py::test_only_failures_in_a_row_count",
            "tests/test_async_engine.py::test_the_probe_finds_out_when_no_request_is_left",
        ),
    ),
    Task(
        number=6,
        file="app.py",
        functions=("unless_gone", "Api._respond"),
        title="a client that leaves",
        text="unless_gone: return the result of `work`, or raise its error; but if the client "
        "leaves first, cancel the work, wait until it has ended, and raise ApiError 499. "
        "Api._respond: answer with a Stream, or with one body made of all answers. However "
        "the answer ends, self._release(choices) aborts what is left in the engine.",
        points=15,
        hints=(
            "gone(request.receive) ends when the client has left. asyncio.wait with "
            "FIRST_COMPLETED waits for two tasks.",
            "Cancel both tasks on every way out, and gather them with return_exceptions: the work "
            "may need a moment to end.",
            "Stream takes Events(self.service, choices, form, self.service.stream_interval), a "
            "function that releases, and the deadline. For one body, send form.whole(await "
            "self._answers(choices)) as JSON, before the deadline, in a try whose finally "
            "releases.",
        ),
        tests=(
            "tests/test_inside.py::test_work_is_cancelled_when_its_client_leaves_and_not_before",
            "tests/test_inside.py::test_a_client_that_leaves_before_its_answer_ends_it",
            "tests/test_inside.py::test_a_reader_that_stands_still_is_cut_off_and_ends_its_answer",
        ),
    ),
)
