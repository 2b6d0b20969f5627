"""The tasks of this stage for `python -m shared.course.exercise`: texts, hints, points, tests."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="request.py",
        functions=("Request.tokens",),
        title="the tokens of a request",
        text="Return the ids at positions start..start+count-1 of prompt, answer and drafts "
        "together, without joining the prompt to the rest first.",
        points=5,
        hints=(
            "The positions may be in the prompt, after it, or across the border.",
            "A slice of the prompt, plus a slice of answer and drafts: positions in the answer are "
            "smaller by the prompt's length.",
            "A slice may begin after the end of a list, and is then empty; but it must not begin "
            "before 0, where it would count from the end.",
        ),
        tests=("tests/test_request.py::test_tokens_across_the_border_of_prompt_and_answer",),
    ),
    Task(
        number=2,
        file="cache.py",
        functions=("SlotCache.move",),
        title="a clean slot for the next sequence",
        text="For each wipe among the moves, zero the first `used` positions of its slot, in all "
        "layers, keys and values alike, and nothing else.",
        points=5,
        hints=(
            "Which axis of (layers, 2, slots, H, slot_tokens, D) is which?",
            "One assignment of 0 to a slice does it, for each wipe.",
            "Index the axis of slots with the slot and the axis of tokens with a slice up to "
            "`used`; take all others whole.",
        ),
        tests=("tests/test_cache.py::test_a_wipe_clears_one_slot_up_to_what_was_used",),
    ),
    Task(
        number=3,
        file="cache.py",
        functions=("neighbours",),
        title="who attends together",
        text="Cut the shares of a step into runs that can attend in one call: adjacent slots, the "
        "same number of new tokens, and similar lengths. Two lengths differ too much if more than "
        "CALL keys would be read in vain.",
        points=15,
        hints=(
            "Go through the shares in order; each joins the run before it or begins a new one.",
            "It joins if its slot is the last one's plus 1, its count is the same, and the padding "
            "is worth it. Padding is counted in keys: all are read as long as the longest.",
            "If the new share is longer than the run's longest start, every share of the run reads "
            "the difference; if it is shorter, it reads the difference itself. Multiply by the new "
            "tokens, and compare with CALL.",
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
        title="who runs in the next step",
        text="Make the plan of the next step: who runs, and how many tokens of each. Decoding "
        "requests go first; the rest of the budget goes to chunks of prompts, and then to waiting "
        "requests for which a slot is free. No request overtakes the first in line. Admission "
        "means: out of the line, RUNNING, the lowest free slot, a Wipe of what the slot's last "
        "sequence used, among the running.",
        points=30,
        hints=(
            "self._share gives the number of tokens of a request that fit into the budget left, "
            "and self._work makes its Work for the plan.",
            "Decodes and chunks are one list: the running requests, sorted by whether they are "
            "decoding. Python's sort keeps the order of equals.",
            "While a request waits and a slot is free, look at self._next_waiting(); if its share "
            "is 0, stop. Count the step before anything else; free_slots is a heap, and dirty has "
            "the positions used of each slot.",
        ),
        tests=(
            "tests/test_scheduler.py::test_a_long_prompt_goes_in_chunks_and_samples_after_the_last",
            "tests/test_scheduler.py::test_decodes_go_first_and_prompts_share_the_rest",
            "tests/test_scheduler.py::test_a_decode_overtakes_a_prompt_that_was_admitted_before_it",
            "tests/test_scheduler.py::"
            "test_without_chunks_a_prompt_runs_whole_and_none_overtakes_it",
            "tests/test_scheduler.py::"
            "test_the_lowest_free_slot_is_taken_and_a_freed_one_is_filled_in_the_next_pass",
            "tests/test_scheduler.py::"
            "test_no_request_starves_under_a_constant_stream_of_urgent_ones",
            "tests/test_scheduler.py::test_a_slot_is_wiped_as_far_as_its_last_sequence_came",
        ),
    ),
    Task(
        number=5,
        file="cache.py",
        functions=("PackedAttention.attend",),
        title="attention over packed tokens",
        text="Write the keys and values of N packed tokens to their slots and positions, and "
        "return the attention of their queries, group by group. q and the result are (N, heads, "
        "D), k and v (N, H, D).",
        points=20,
        hints=(
            "self.kv[layer] gives keys and values, each (slots, H, slot_tokens, D). self.slots and "
            "self.positions, both (N,), are the addresses of all tokens.",
            "An assignment with two index tensors writes them all at once, in the dtype of the "
            "cache. Then each group attends: its rows of q, unpacked to B sequences of T tokens "
            "with heads in front.",
            "keys[group.slots, :, :group.end] is a view, (B, H, end, D). masked_attention takes "
            "the group's mask and its `causal`; turn its result back, and store it in the group's "
            "rows.",
        ),
        tests=("tests/test_cache.py::test_any_packing_is_explicit_attention_of_each_sequence",),
    ),
    Task(
        number=6,
        file="engine.py",
        functions=("Engine._postprocess",),
        title="after the step",
        text="Note what a step has computed and sampled: the scheduler advances every request by "
        "its share, each sampled token goes to its output with the finish reason, and ended "
        "requests are released. Return the tokens, each with the id of its request.",
        points=25,
        hints=(
            "self.scheduler.advance first; then a loop over the samples, and one over the plan's "
            "work for the requests that have ended.",
            "Append the token before you call finish_reason, which looks at the newest.",
            "The output's finish_reason is set from finish_reason(...); the Token that is returned "
            "carries it too. A request may also end without a token (its logits were not finite): "
            "look at the outputs of all the work, and release with self._finish.",
        ),
        tests=(
            "tests/test_contract.py::TestSlots::test_the_whole_record_of_a_small_crowd",
            "tests/test_contract.py::TestSlots::test_each_token_comes_with_the_id_of_its_request",
            "tests/test_contract.py::TestSlots::test_a_stop_makes_room_at_once",
            "tests/test_contract.py::TestSlots::test_each_of_several_end_ids_ends_its_own_request",
            "tests/test_contract.py::"
            "TestSlots::test_prompt_and_answer_fill_the_context_and_no_more",
        ),
    ),
)
