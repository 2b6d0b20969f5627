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
        points=10,
        hints=(
            "The longest possible answer is len(stop) - 1, and at most the length of the text.",
            "Try the longest first: does the text end with that much of the stop string?",
            "A loop down to 1 that returns the first length that fits, and 0 after it.",
        ),
        tests=(
            "tests/test_text.py::test_overlap",
            "tests/test_text.py::"
            "test_nothing_of_a_stop_string_leaks_and_no_more_is_held_back_than_needed",
        ),
    ),
    Task(
        number=2,
        file="chat.py",
        functions=("ChatTemplate.prompt",),
        title="from a chat to a prompt",
        text="Make the text that the model continues: a line for each message, by its role, and "
        "then `start`. A role that the template does not know is written with its own name. A "
        "user's message must never be taken for a template.",
        points=10,
        hints=(
            "self.roles maps a role to its line, in which {content} is replaced by the message.",
            "str.format would interpret braces in a message: use replace on the template's line, "
            "never on the message.",
            "An unknown role becomes its name with a capital, a colon, a space, the text and a "
            "newline. Join all lines and add self.start.",
        ),
        tests=(
            "tests/test_protocol.py::test_the_simple_template",
            "tests/test_protocol.py::test_a_message_is_never_a_template",
            "tests/test_protocol.py::test_a_template_from_a_file",
        ),
    ),
    Task(
        number=3,
        file="protocol.py",
        functions=("SamplingBody.params",),
        title="what a client asks of the sampler",
        text="Make SamplingParams of a body, for sample number `sample` of a prompt. Options that "
        "were not sent keep the engine's defaults, but the temperature is 1, as OpenAI has it. "
        "With a seed, each sample has a valid seed of its own; -1 and None stay as they are.",
        points=15,
        hints=(
            "A field that is null counts as not sent: leave out every None.",
            "JSON keys are always text: logit_bias needs whole numbers. stop_token_ids needs a "
            "tuple.",
            "The seed of sample n is seed + n, modulo 2**63. Sample 0 keeps the seed as it was "
            "sent, even a negative one.",
        ),
        tests=(
            "tests/test_protocol.py::test_the_defaults_are_openais",
            "tests/test_protocol.py::test_each_sample_has_a_seed_of_its_own",
            "tests/test_protocol.py::test_every_seed_makes_valid_options_for_every_sample",
            "tests/test_protocol.py::test_all_options_reach_the_sampler",
        ),
    ),
    Task(
        number=4,
        file="text.py",
        functions=("TextStream._release",),
        title="hold back and release",
        text="Given the new characters, return the text that may be shown now. If a stop string is "
        "complete, the text ends there: self.stop is set, and nothing follows. If the end may be "
        "the beginning of a stop string, hold exactly that much back in self._held.",
        points=20,
        hints=(
            "Search in the held text and the new text together: a stop string may span both.",
            "Of several stop strings the first to be complete wins, and of those that end at the "
            "same place the longest. keep_stop: the stop string belongs to the text.",
            "Sort the matches by (end, minus length). Without a match, keep the largest `overlap` "
            "of all stop strings. Without stop strings everything may be shown at once.",
        ),
        tests=(
            "tests/test_text.py::test_stop_strings_end_the_text_wherever_the_tokens_are_cut",
            "tests/test_text.py::test_stop_strings_by_hand",
        ),
    ),
    Task(
        number=5,
        file="async_engine.py",
        functions=("AsyncEngine.submit",),
        title="into the engine, all or none",
        text="Accept some prompts, with one sample of each for each of the sampling options, and "
        "return the tickets, a list for each prompt. All or none: a request that can never be "
        "answered, or has no place, is refused before anything is accepted. The engine changes "
        "only through a command to its thread.",
        points=25,
        hints=(
            "Three checks first: is the engine alive, can each sample ever be answered "
            "(self._engine.check reads constant settings), is there room for all?",
            "Then make the tickets, which share one event, note them in self.in_flight by id, and "
            "send one command for each prompt, so that its samples arrive together.",
            "The command is self._add with the prompt, the options, the salt and the tickets' ids: "
            "partial makes a function of it that the thread calls later.",
        ),
        tests=(
            "tests/test_async_engine.py::test_samples_of_a_prompt_share_its_blocks",
            "tests/test_async_engine.py::test_capacity_is_counted_in_sequences",
            "tests/test_async_engine.py::test_a_request_that_can_never_be_answered_takes_no_place",
        ),
    ),
    Task(
        number=6,
        file="async_engine.py",
        functions=("AsyncEngine.tokens",),
        title="read the tokens of an answer",
        text="Write the async generator that yields the tokens of some tickets, each time one "
        "ticket with its fresh tokens, until all their sequences have ended. A slow reader gets "
        "more "
        "tokens at a time and delays no other request. If a failure ended a sequence, raise "
        "EngineDead or Broken after its last token; at the deadline, raise TimeoutError.",
        points=20,
        hints=(
            "The tickets share one event, ticket.news. Wait for it only when no ticket has tokens "
            "to read, and clear it right before: there is no await between, so nothing is lost. "
            "asyncio.timeout_at raises at the deadline.",
            "Take a ticket's list of fresh tokens, leave an empty one, and remember in the same "
            "line whether it has ended: more may arrive during a yield.",
            "Yield the tokens if there are any; drop a ticket that has ended. If its reason is "
            "'error', raise: EngineDead for CLOSING and DEAD, Broken for any other ticket.error.",
        ),
        tests=(
            "tests/test_async_engine.py::test_the_tokens_are_those_of_the_first_stage",
            "tests/test_async_engine.py::test_a_slow_reader_delays_no_other",
            "tests/test_async_engine.py::test_a_deadline_ends_the_waiting",
            "tests/test_async_engine.py::test_a_failing_step_ends_only_its_requests",
            "tests/test_async_engine.py::test_nothing_waits_for_a_dead_engine",
        ),
    ),
)
