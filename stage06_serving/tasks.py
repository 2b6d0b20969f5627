"""The tasks of this stage, for `python -m shared.course.exercise`: what to write, hints, points, and the tests that judge it."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="text.py",
        functions=("overlap",),
        title="the beginning of a stop string",
        text="How many characters at the end of `text` may be the beginning of `stop`? A whole stop string is no beginning.",
        points=10,
        hints=(
            "The longest possible answer is len(stop) - 1, and no more than the text has.",
            "Try the longest first: does the text end with that much of the stop string?",
            "A loop downwards to 1 that returns the first length that fits, and 0 behind it.",
        ),
        tests=(
            "tests/test_text.py::test_overlap",
            "tests/test_text.py::test_nothing_of_a_stop_string_leaks_and_no_more_is_held_back_than_must_be",
            "tests/test_text.py::test_a_beginning_that_comes_to_nothing_is_given_out",
        ),
    ),
    Task(
        number=2,
        file="chat.py",
        functions=("ChatTemplate.prompt",),
        title="from a chat to a prompt",
        text="Make the text that the model continues: a line for each message, by its role, and then `start`. A role that the "
        "template does not know is written with its own name. What a user has said must never be taken for a template.",
        points=10,
        hints=(
            "self.roles maps a role to its line, in which {content} stands for what was said.",
            "str.format would read braces in what the user says: use replace, and replace in the template, never in the text.",
            "An unknown role becomes its name with a capital, a colon, a space, the text and a newline. Join all lines and add "
            "self.start.",
        ),
        tests=(
            "tests/test_protocol.py::test_the_simple_template",
            "tests/test_protocol.py::test_what_is_said_is_no_template",
            "tests/test_protocol.py::test_a_template_from_a_file",
        ),
    ),
    Task(
        number=3,
        file="protocol.py",
        functions=("SamplingBody.params",),
        title="what a client asks of the sampler",
        text="Make SamplingParams of a body, for sample number `sample` of a prompt. Options that were not sent keep the "
        "engine's defaults, but the temperature is 1, as OpenAI has it. With a seed, each sample has another one, which is "
        "valid too; -1 and None stay as they are.",
        points=15,
        hints=(
            "null and nothing are the same: leave out what is None.",
            "JSON has only text for keys: logit_bias needs whole numbers. stop_token_ids needs a tuple.",
            "The seed of sample n is seed + n, brought back into range by a remainder of 2**63. Sample 0 keeps the seed as it "
            "was sent, even a negative one.",
        ),
        tests=(
            "tests/test_protocol.py::test_what_is_not_said_is_as_openai_has_it",
            "tests/test_protocol.py::test_each_sample_has_a_seed_of_its_own",
            "tests/test_protocol.py::test_every_seed_makes_valid_options_for_every_sample",
            "tests/test_protocol.py::test_all_options_reach_the_sampler",
        ),
    ),
    Task(
        number=4,
        file="text.py",
        functions=("TextStream._release",),
        title="hold back and let go",
        text="Given the new characters, return what may be shown now. If a stop string is complete, the text ends there: "
        "self.stop is set, and nothing comes after it. If the end may be the beginning of one, hold just that much back in "
        "self._held.",
        points=20,
        hints=(
            "Look at what was held back together with what is new: a stop string may lie across both.",
            "Of several stop strings the one that is complete first wins, and of those that end at the same place the longest. "
            "keep_stop says whether it belongs to the text.",
            "Sort what was found by (where it ends, minus its length). If nothing was found, `overlap` says how much to keep, "
            "and the largest of all stop strings counts. Without stop strings everything may be shown at once.",
        ),
        tests=(
            "tests/test_text.py::test_stop_strings_end_the_text_wherever_the_tokens_are_cut",
            "tests/test_text.py::test_a_stop_string_across_many_tokens",
            "tests/test_text.py::test_the_first_to_be_complete_wins_and_of_two_the_longer",
            "tests/test_text.py::test_the_stop_string_stays_where_it_is_wanted",
        ),
    ),
    Task(
        number=5,
        file="async_engine.py",
        functions=("AsyncEngine.submit",),
        title="into the engine, all or none",
        text="Take in some prompts, of each as many samples as there are sampling options, and return the tickets, a list for "
        "each prompt. All or none: what can never be answered, or has no place, is refused before anything is taken in. "
        "The engine itself is touched only through a command to its thread.",
        points=25,
        hints=(
            "Three questions first: does the engine live, can each of them ever be answered (engine.check only reads), is there "
            "room for all?",
            "Then make the tickets, note them in self.in_flight by id, and send one command for each prompt, so that its "
            "samples are computed together.",
            "The command is self._add with the prompt, the options, the salt and the ids of the tickets: partial makes a "
            "function of it that the thread calls later.",
        ),
        tests=(
            "tests/test_async_engine.py::test_samples_of_a_prompt_are_computed_together",
            "tests/test_async_engine.py::test_capacity_is_counted_in_sequences",
            "tests/test_async_engine.py::test_what_can_never_be_answered_takes_no_place",
        ),
    ),
    Task(
        number=6,
        file="async_engine.py",
        functions=("AsyncEngine.tokens",),
        title="read what the engine says",
        text="Write the async generator that yields the tokens of some tickets, each time one ticket with its fresh tokens, "
        "until all their sequences have ended. A slow reader gets more tokens at a time and delays no other request. If a "
        "failure ended a sequence, raise EngineDead or Broken after its last token; if nothing arrives before the deadline, "
        "raise TimeoutError.",
        points=20,
        hints=(
            "All tickets share one event, ticket.news. Wait for it only when no ticket has anything to read, and clear it "
            "right before: there is no await between, so nothing is lost. asyncio.timeout_at raises at the deadline.",
            "Take a ticket's list of fresh tokens, leave an empty one, and remember in the same line whether it has ended: "
            "more may arrive during a yield.",
            "Yield the tokens if there are any; drop a ticket that has ended. If its reason is 'error', raise: EngineDead "
            "for CLOSING and DEAD, Broken for any other ticket.error.",
        ),
        tests=(
            "tests/test_async_engine.py::test_the_tokens_are_those_of_the_first_stage",
            "tests/test_async_engine.py::test_a_slow_reader_holds_up_nobody",
            "tests/test_async_engine.py::test_a_failing_step_ends_only_its_requests",
            "tests/test_async_engine.py::test_nobody_waits_for_a_dead_engine",
        ),
    ),
)
