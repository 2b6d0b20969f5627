"""The tasks of this stage, for `python -m shared.course.exercise`: what to write, hints, points, and the tests that judge it."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="request.py",
        functions=("Request.tokens",),
        title="the tokens of a request",
        text="Return the ids at positions start..start+count-1 of prompt and answer together, without putting the two together "
        "first.",
        points=5,
        hints=(
            "What is asked for may lie in the prompt, in the answer, or across the border.",
            "A slice of the prompt, plus a slice of the answer: positions in the answer are smaller by the prompt's length.",
            "A slice may begin behind the end of a list, and is then empty; but it must not begin before 0, where it would "
            "count from the end.",
        ),
        tests=("tests/test_request.py::test_tokens_across_the_border_of_prompt_and_answer",),
    ),
    Task(
        number=2,
        file="cache.py",
        functions=("SlotCache.reset",),
        title="a clean slot for the next tenant",
        text="Wipe the first `used` positions of a slot, in all layers, keys and values alike, and nothing else.",
        points=5,
        hints=(
            "Which axis of (layers, 2, slots, H, slot_tokens, D) is which?",
            "One assignment of 0 to a slice does it.",
            "Index the slots' axis with the slot and the axis of tokens with a slice up to `used`; all others are whole.",
        ),
        tests=("tests/test_cache.py::test_a_wipe_clears_one_slot_up_to_what_was_used",),
    ),
    Task(
        number=3,
        file="cache.py",
        functions=("neighbours",),
        title="who attends together",
        text="Cut the shares of a pass into runs that can attend in one call: slots next to each other, the same number of new "
        "tokens, and not too unlike in length. Two lengths are too unlike if more than CALL keys would be read for "
        "nothing.",
        points=15,
        hints=(
            "Go through the shares in order; each joins the run before it or begins a new one.",
            "It joins if its slot is the last one's plus 1, its count is the same, and the padding is worth it. Padding is "
            "counted in keys: all are read as long as the longest.",
            "If the new share is longer than the run's longest start, every share of the run reads the difference; if it is "
            "shorter, it reads the difference itself. Times the new tokens, and compared with CALL.",
        ),
        tests=(
            "tests/test_cache.py::test_grouping_rules",
            "tests/test_cache.py::test_keys_and_values_are_read_in_place",
        ),
    ),
    Task(
        number=4,
        file="scheduler.py",
        functions=("Scheduler.schedule",),
        title="who runs in the next pass",
        text="Decide who runs and how many tokens of each. Running requests with a single token to compute go first; what is "
        "left of the budget goes to chunks of prompts, and then to waiting requests for which a slot is free. Nobody "
        "overtakes the first in line. Admitting means: out of the line, RUNNING, the lowest free slot, among the running.",
        points=30,
        hints=(
            "self._share says how many tokens of a request fit into what is left of the budget, and self._work makes the "
            "decision of it.",
            "Singles and chunks are one list: the running requests, sorted by whether more than one token remains. Python's "
            "sort keeps the order of equals.",
            "For the waiting: while there are some and a slot is free, look at self._next_waiting(); if its share is 0, stop. "
            "Count the step before anything else; free_slots is a heap.",
        ),
        tests=(
            "tests/test_scheduler.py::test_a_long_prompt_goes_in_chunks_and_samples_after_the_last",
            "tests/test_scheduler.py::test_decodes_go_first_and_prompts_share_the_rest",
            "tests/test_scheduler.py::test_a_decode_overtakes_a_prompt_that_was_admitted_before_it",
            "tests/test_scheduler.py::test_without_chunks_a_prompt_runs_whole_and_nobody_overtakes_it",
            "tests/test_scheduler.py::test_the_lowest_free_slot_is_taken_and_a_freed_one_is_filled_in_the_next_pass",
            "tests/test_scheduler.py::test_nobody_starves_under_a_constant_stream_of_urgent_requests",
        ),
    ),
    Task(
        number=5,
        file="cache.py",
        functions=("PackedAttention.attend",),
        title="attention over packed tokens",
        text="Write the keys and values of N packed tokens to their slots and positions, and return the attention of their "
        "queries, group by group. q, k, v and the result are (N, H, D).",
        points=20,
        hints=(
            "self.kv[layer] gives keys and values, each (slots, H, slot_tokens, D). self.slots and self.positions, both (N,), "
            "are the addresses of all tokens.",
            "An assignment with two index tensors writes them all at once. Then each group attends: its rows of q, unpacked to "
            "B sequences of T tokens with heads in front.",
            "keys[group.slots, :, :group.end] is a view, (B, H, end, D). masked_attention takes the group's mask and its "
            "`causal`; what it returns is turned back and goes to the group's rows of the result.",
        ),
        tests=(
            "tests/test_cache.py::test_any_packing_is_explicit_attention_of_each_sequence",
            "tests/test_cache.py::test_any_cutting_into_passes_gives_the_hidden_states_of_one_pass",
            "tests/test_cache.py::test_a_pass_writes_its_own_tokens_and_nothing_else",
        ),
    ),
    Task(
        number=6,
        file="engine.py",
        functions=("Engine._postprocess",),
        title="after the pass",
        text="Write down what a pass has computed and said: every request's `computed` grows by its share, each sampled token "
        "goes to its output with the finish reason, and whoever has ended is let go of. Return the tokens, each with the "
        "id of its request.",
        points=25,
        hints=(
            "Three loops: over the work, over what was sampled, and over the work again for those who have ended.",
            "Append the token before you ask for the finish reason, which looks at the newest. self.limits knows where an "
            "answer ends for want of room.",
            "The output's finish_reason is set from finish_reason(...); the Token that is returned carries it too. A request "
            "may have ended for another reason than its token (its scores were not numbers): look at the outputs of all of the "
            "work.",
        ),
        tests=(
            "tests/test_contract.py::TestSlots::test_the_whole_record_of_a_small_crowd",
            "tests/test_contract.py::TestSlots::test_each_token_comes_with_the_id_of_its_request",
            "tests/test_contract.py::TestSlots::test_a_stop_makes_room_at_once",
            "tests/test_contract.py::TestSlots::test_prompt_and_answer_fill_the_context_and_no_more",
        ),
    ),
)
