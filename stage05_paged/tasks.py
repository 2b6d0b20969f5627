"""The tasks of this stage for `python -m shared.course.exercise`: texts, hints, points, tests."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="blocks.py",
        functions=("BlockPool.take", "BlockPool.share", "BlockPool.give_back"),
        title="take, share, give back",
        text="Write the three calls that move a block between free, cached and owned. `take` "
        "returns a free block, or evicts the least recently used cached one; `share` counts one "
        "more table, `give_back` one less; the last `give_back` leaves the block cached if it was "
        "published, else free. Each takes constant time, and raises RuntimeError for an invalid "
        "call.",
        points=15,
        hints=(
            "A block is in one of three states: in self.free, in self.cached, or with references "
            "above 0. Every call keeps that true.",
            "self.free is a stack. self.cached is an OrderedDict, least recently used first: "
            "popitem(last=False) evicts. Forget an evicted block, and count the eviction.",
            "In which states may share get a block, and what must it leave then? self.shared "
            "counts the blocks with two references or more: at which counts does it change?",
        ),
        tests=(
            "tests/test_blocks.py::test_all_blocks_are_given_once_and_come_back",
            "tests/test_blocks.py::test_no_block_is_lost_or_counted_wrong_whatever_is_called",
            "tests/test_blocks.py::"
            "test_an_unowned_block_is_not_given_back_and_a_free_one_not_shared",
            "tests/test_blocks.py::"
            "test_a_published_block_is_kept_when_no_table_holds_it_and_can_be_shared_again",
            "tests/test_blocks.py::"
            "test_the_least_recently_used_block_is_evicted_first_and_after_the_free_ones",
        ),
    ),
    Task(
        number=2,
        file="blocks.py",
        functions=("BlockTable.digest", "BlockPool.publish", "BlockPool.match"),
        title="names of full blocks",
        text="Name full blocks, so that a text with the same beginning finds them. `tokens` follow "
        "the blocks named so far: `digest` adds the names of their full blocks, and returns all "
        "names. It must be right however the tokens are divided into calls, and hash no token "
        "twice. `publish` makes a block findable by a name, unless the name leads to another block "
        "already, or the block has a name. `match` finds the blocks of the longest known "
        "beginning.",
        points=10,
        hints=(
            "`chain` makes a name from the parent's name and the tokens of one block. Tokens after "
            "the last full block are left out.",
            "What is the parent of the first block? The SHA-256 of the salt, so that only requests "
            "with equal salts share.",
            "pool.by_digest maps a name to its block, and pool.digests maps back: what must both "
            "hold after `publish`, and when does it change neither? Does looking up a name take "
            "the block?",
        ),
        tests=(
            "tests/test_blocks.py::"
            "test_digests_are_worked_out_once_a_full_block_and_whatever_the_pieces",
            "tests/test_blocks.py::test_other_salts_find_nothing",
            "tests/test_blocks.py::"
            "test_the_first_of_two_equal_blocks_is_found_and_only_behind_its_beginning",
        ),
    ),
    Task(
        number=3,
        file="cache.py",
        functions=("padded", "addresses"),
        title="addresses through a table",
        text="`padded` puts the tables of a step into one tensor. A table's own last block fills "
        "the places that it lacks. `addresses` gives the slot and the position of each packed "
        "token; the slots of block b begin at b * size.",
        points=10,
        hints=(
            "Which sequence does packed token i belong to, and what is its position there? A loop "
            "may answer that first; repeat_interleave and cumsum do it without one.",
            "A position's block is an entry of its sequence's table; the remainder is the place in "
            "that block.",
            "A tensor can be indexed by two tensors of equal shape. What must the two say of each "
            "packed token, so that the tables give its block?",
        ),
        tests=(
            "tests/test_cache.py::test_addresses_go_through_the_tables",
            "tests/test_cache.py::"
            "test_a_whole_prompt_gathers_nothing_and_a_chunk_only_what_it_sees",
        ),
    ),
    Task(
        number=4,
        file="cache.py",
        functions=("PagedAttention.attend",),
        title="attention with a gather",
        text="Write the keys and values of N packed tokens to their slots, and return the "
        "attention of their queries: q, k, v and the result are (N, H, D). Whole "
        "prompts attend over the keys and values that were just computed. The others attend tile "
        "by tile, over what is gathered from the blocks into the tile's memory.",
        points=15,
        hints=(
            "kv[layer] is (2, H, blocks, block_size, D). Viewed as (2, H, slots, D), it takes new "
            "keys and values by slot; viewed as rows of block_size * D numbers, it is what a "
            "tile's `lines` index.",
            "torch.index_select copies rows in any order, and `out` is the target. tile.keys and "
            "tile.values are that same memory, as attention reads it.",
            "A tile has some of the heads, and some of the rows. Which rows and heads of q attend "
            "to them, and where do they go in the result?",
        ),
        tests=(
            "tests/test_cache.py::test_any_packing_is_explicit_attention_of_each_sequence",
            "tests/test_cache.py::test_the_cache_has_a_dtype_of_its_own",
            "tests/test_cache.py::test_query_heads_read_the_head_of_keys_that_they_share",
        ),
    ),
    Task(
        number=5,
        file="scheduler.py",
        functions=("Scheduler._make_room", "Scheduler._grow", "Scheduler._preempt"),
        title="make room",
        text="Before a step every running request needs blocks for its tokens. `_make_room` goes "
        "from the most senior to the most junior and lets each `_grow`: it gets new blocks, each "
        "wiped by a move. While blocks are missing, `_make_room` preempts the most junior request, "
        "until enough are available or the growing request itself is preempted. It returns whether "
        "a request was preempted. `_preempt` takes a running request's blocks and puts the request "
        "back in line in order of arrival, with its answer so far. Either its computed blocks move "
        "to the swap pool, or its keys and values are dropped and computed again; self._swaps "
        "decides.",
        points=20,
        hints=(
            "self._rank is seniority: the lowest keeps its memory longest. A request that was "
            "preempted in this round must not grow in it.",
            "Only computed blocks are worth swapping. Name the table's blocks in the moves before "
            "you release it; the moves come before any wipe.",
            "Each way has its own counter. What must `computed` be after each, and where else is "
            "the request listed: self.swapped, self._preempted, self.running, self.waiting?",
        ),
        tests=(
            "tests/test_scheduler.py::test_the_most_junior_gives_its_memory_back",
            "tests/test_scheduler.py::"
            "test_the_senior_is_served_first_even_if_it_was_admitted_later",
            "tests/test_scheduler.py::"
            "test_a_preempted_request_keeps_its_place_in_line_and_computes_all_it_has_again",
            "tests/test_scheduler.py::"
            "test_without_chunks_a_recompute_longer_than_the_budget_still_runs",
            "tests/test_scheduler.py::"
            "test_swapped_blocks_go_out_and_come_back_and_the_request_goes_on_where_it_was",
            "tests/test_scheduler.py::"
            "test_only_computed_blocks_are_swapped_and_without_one_the_request_recomputes",
            "tests/test_scheduler.py::"
            "test_swap_blocks_are_taken_if_there_is_room_and_given_back_after_an_abort",
            "tests/test_scheduler.py::test_a_step_that_preempts_admits_no_request",
        ),
    ),
    Task(
        number=6,
        file="scheduler.py",
        functions=("Scheduler._admit",),
        title="admit a request",
        text="Admit a waiting request if there is room, and return whether you did. Share its "
        "parent's blocks, or else those that the cache holds for its tokens; take new blocks for "
        "the rest, and bring swapped ones back. Refuse, and change nothing, if blocks are missing, "
        "if the watermark would not stay free while others run, or if an unchunked prompt does not "
        "fit the budget. self.counts counts copies, swaps, and what was looked up and found, but "
        "not by a request that was preempted or has its parent's blocks.",
        points=30,
        hints=(
            "At least one token must be computed, or there is nothing to sample from: the last one "
            "is never looked up. self._parents_blocks comes first, then self._lookup. With a "
            "parent, all tokens but the last are computed already, and the parent's last block "
            "must be copied unless it is full.",
            "Found blocks without an owner counted as available until now, so count them as needed "
            "too, and the block of a copy as well. `computed` is what the request has or what was "
            "found, whichever is more.",
            "table.replace returns a copy's two blocks: which Move tells the cache? Which swapped "
            "blocks need a Move('in', ...) behind self._grow, although all of them go back to the "
            "swap pool? What do the request's computed and parent have to be from now on?",
        ),
        tests=(
            "tests/test_engine.py::test_the_whole_memory_of_a_small_crowd",
            "tests/test_scheduler.py::test_a_request_that_does_not_fit_waits_and_none_overtakes",
            "tests/test_scheduler.py::"
            "test_found_blocks_without_an_owner_are_not_counted_as_free_room_too",
            "tests/test_scheduler.py::test_the_watermark_stays_free_beside_others",
            "tests/test_scheduler.py::test_a_common_beginning_is_found",
            "tests/test_scheduler.py::test_without_chunks_a_prompt_over_the_budget_is_refused",
            "tests/test_scheduler.py::"
            "test_a_copy_comes_from_the_parents_last_block_and_waits_for_one_of_its_own",
            "tests/test_scheduler.py::test_what_can_still_be_found_is_shared_and_not_copied_back",
            "tests/test_scheduler.py::"
            "test_samples_of_a_prompt_compute_it_once_and_share_its_full_blocks",
            "tests/test_scheduler.py::"
            "test_a_preempted_request_finds_its_own_blocks_which_does_not_flatter_the_rate",
            "tests/test_engine.py::test_salts_keep_tenants_apart",
        ),
    ),
)
