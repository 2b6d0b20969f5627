"""The tasks of this stage for `python -m shared.course.exercise`: texts, hints, points, tests."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="plan.py",
        functions=("Plan.tokens",),
        title="pack a step",
        text="Turn the plan of a step into what the runner takes: the ids of all shares, one share "
        "after another; for each share, where its sequence is kept, its first position and its "
        "number of tokens; and the places among the ids whose logits are wanted.",
        points=5,
        hints=(
            "Each Work knows its request, its table, where it starts and how many tokens it has. "
            "A request gives its own ids.",
            "A share wants the logits of its last `rows` tokens. Where are these in the pack, once "
            "its ids have been added?",
            "How many ids does the pack hold after a share is added, and at which places among "
            "them are its last `rows`?",
        ),
        tests=("tests/test_request.py::test_a_plan_is_packed_share_by_share",),
    ),
    Task(
        number=2,
        file="cache.py",
        functions=("addresses", "PackedAttention._group"),
        title="addresses and masks of a packed step",
        text="Work out what is the same in every layer of a step. `addresses` gives the slot and "
        "the position of each packed token. `_group` describes a run of B adjacent sequences with "
        "T new tokens each: how many keys attention reads from each slot, and which of them each "
        "query sees. Make no mask where none is needed: where every key is visible, or where one "
        "whole prompt attends alone, which is `causal`.",
        points=20,
        hints=(
            "No loop over tokens is needed: torch.repeat_interleave and torch.arange make all "
            "addresses from the shares.",
            "A query at position p sees the keys 0 to p of its own slot. Attention reads every "
            "sequence of a group as far as the longest one needs.",
            "Compare key indices with query positions, shaped so that they broadcast to (B, 1, T, "
            "end). When is every entry of that mask True?",
        ),
        tests=("tests/test_cache.py::test_groups_of_a_pass",),
    ),
    Task(
        number=3,
        file="cache.py",
        functions=("PackedAttention.attend",),
        title="attention over packed tokens",
        text="Write the keys and values of N packed tokens to their slots and positions, and "
        "return the attention of their queries, group by group. q and the result are (N, heads, "
        "D), k and v (N, H, D). Read earlier keys and values in place.",
        points=15,
        hints=(
            "self.kv[layer] gives keys and values, each (slots, H, slot_tokens, D). self.slots and "
            "self.positions, both (N,), are the addresses of all tokens.",
            "One assignment with two index tensors writes all keys. Attention wants the heads "
            "before the tokens: which rows of q belong to a group, and to how many sequences?",
            "Which of the two copies: a slice of slots, or a list of them? masked_attention takes "
            "the group's mask and its `causal`: how does its result become rows of q again?",
        ),
        tests=(
            "tests/test_cache.py::test_any_packing_is_explicit_attention_of_each_sequence",
            "tests/test_cache.py::test_the_cache_has_a_dtype_of_its_own",
            "tests/test_cache.py::test_keys_and_values_are_read_in_place",
        ),
    ),
    Task(
        number=4,
        file="scheduler.py",
        functions=(
            "Scheduler.schedule",
            "Scheduler._chunk_size",
            "Scheduler._work",
            "Scheduler.finish",
        ),
        title="who runs in the next step",
        text="Make the plan of the next step: who runs, and how many tokens of each. Decoding "
        "requests go first; the rest of the budget goes to chunks of prompts, and then to waiting "
        "requests for which a slot is free. No request overtakes the first in line. To admit a "
        "request, take it out of the line, make it RUNNING, give it the lowest free slot, plan a "
        "Wipe of as many positions as the slot's last sequence had tokens (0 in a new slot), and "
        "add it to the running requests. `finish` undoes this. `_chunk_size` is how much of a "
        "request fits into a budget, `_work` its entry in the plan.",
        points=30,
        hints=(
            "Decodes and chunks are one list. Python's sort keeps the order of equals.",
            "A share is limited by what remains, by max_chunk and by the budget; without chunks it "
            "is all or nothing. Logits are wanted when the last token is computed.",
            "Count the step before anything else. free_slots is a heap. dirty has the tokens of "
            "each slot's last sequence: what writes it, and when?",
        ),
        tests=(
            "tests/test_scheduler.py::test_plans_step_by_step",
            "tests/test_scheduler.py::"
            "test_the_lowest_free_slot_is_taken_and_a_freed_one_is_filled_in_the_next_pass",
            "tests/test_scheduler.py::test_a_slot_is_wiped_as_far_as_its_last_sequence_came",
            "tests/test_contract.py::TestSlots::test_abort_at_any_moment_changes_no_other_request",
        ),
    ),
    Task(
        number=5,
        file="scheduler.py",
        functions=("Scheduler._next_waiting", "Scheduler._waited"),
        title="next in line, with patience",
        text='Choose the next waiting request. "fcfs" is first come, first served. Under '
        '"priority" the lowest number goes first, ties by arrival, and every `patience` steps '
        "of waiting are worth one priority, so that no request waits forever.",
        points=10,
        hints=(
            "self.waiting is in the order of arrival.",
            "How long has a request waited? It knows the scheduler's step at its arrival.",
            "How does Python's min compare keys that are tuples? What is half of `patience` "
            "worth, if only whole priorities count?",
        ),
        tests=(
            "tests/test_scheduler.py::"
            "test_no_request_starves_under_a_constant_stream_of_urgent_ones",
            "tests/test_scheduler.py::test_the_policy_decides_who_is_next_and_ties_go_by_arrival",
        ),
    ),
    Task(
        number=6,
        file="engine.py",
        functions=("Engine.step", "Engine._postprocess"),
        title="a step",
        text="Write a step of the engine: schedule, move, run, sample, postprocess; observers see "
        "the plan before the pass and after the step, and the recorder's `model_time` measures the "
        "pass. While nothing is planned, self.plan is empty: `fail` must know which requests were "
        "in a failed pass. `_postprocess` records what was computed and sampled, releases the "
        "requests that have ended, and returns the tokens, each with the id of its request.",
        points=20,
        hints=(
            "The lesson's step 4 has the order. When does self.plan change, if moving memory may "
            "fail too?",
            "finish_reason takes the new id and the request's row, whose output does not hold it "
            "yet. The Token with the reason is appended to the output, and returned.",
            "Logits that are not finite end a request without a token. Where in the plan do you "
            "see that it has ended, if not among the sampled?",
        ),
        tests=(
            "tests/test_contract.py::TestSlots::test_the_whole_record_of_a_small_crowd",
            "tests/test_contract.py::TestSlots::test_each_token_comes_with_the_id_of_its_request",
            "tests/test_contract.py::TestSlots::test_a_stop_makes_room_at_once",
            "tests/test_contract.py::TestSlots::test_each_of_several_end_ids_ends_its_own_request",
            "tests/test_contract.py::"
            "TestSlots::test_prompt_and_answer_fill_the_context_and_no_more",
            "tests/test_contract.py::TestSlots::test_a_failure_outside_of_a_pass_ends_all",
            "tests/test_contract.py::"
            "TestSlots::test_a_pass_that_fails_ends_its_requests_and_no_other",
            "tests/test_contract.py::TestSlots::test_records_are_timed_and_limited",
        ),
    ),
)
