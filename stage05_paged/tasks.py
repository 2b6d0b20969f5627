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
        "table more, `give_back` one less, and the last one leaves the block cached if it was "
        "published, else free. Each takes constant time, and raises RuntimeError for a call that "
        "cannot be.",
        points=20,
        hints=(
            "A block is in one of three states: in self.free, in self.cached, or with references "
            "above 0. Every call keeps that true.",
            "self.free is a stack. self.cached is an OrderedDict, least recently used first: "
            "popitem(last=False) evicts. Forget an evicted block, and count the eviction.",
            "share may get a cached block, which then leaves the cache; a free one is an error. "
            "self.shared counts the blocks with two references or more: it changes when a count "
            "reaches 2, or falls to 1.",
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
        functions=("BlockTable.replace",),
        title="copy-on-write",
        text="Put a new block in place of the shared one at a position, and return (old, new), so "
        "that the content can be copied before it is written.",
        points=5,
        hints=(
            "Position p is in blocks[p // block_size].",
            "Take before you give back: the other way round, the pool might return the very block "
            "that was just released.",
            "Take a block from the pool, put it into the table, give the old one back, return both "
            "numbers.",
        ),
        tests=("tests/test_blocks.py::test_a_table_that_writes_to_a_shared_block_gets_its_own",),
    ),
    Task(
        number=3,
        file="blocks.py",
        functions=("BlockTable.digest",),
        title="names of full blocks",
        text="Compute the digests of the full blocks of `tokens`, which follow the blocks digested "
        "so far, and return all digests. It must be right however the tokens are divided into "
        "calls, and never hash a token twice.",
        points=10,
        hints=(
            "`chain` makes a digest of its parent's and the tokens of one block. Tokens after the "
            "last full block are left out.",
            "The parent is the last digest so far; for the first, it is the SHA-256 of the salt.",
            "Go through `tokens` in steps of the block size, as long as a whole block is left, and "
            "append to self.digests.",
        ),
        tests=(
            "tests/test_blocks.py::"
            "test_digests_are_worked_out_once_a_full_block_and_whatever_the_pieces",
            "tests/test_blocks.py::test_other_salts_find_nothing",
        ),
    ),
    Task(
        number=4,
        file="cache.py",
        functions=("batches",),
        title="moves that go together",
        text="Cut a list of moves into runs that one operator can do: of one kind, in order, and "
        "none that reads or writes a block that an earlier move of its run has written.",
        points=15,
        hints=(
            "Go through the moves in order, and note which blocks the current run has written.",
            "Only a copy reads where the others write: 'out' and 'in' go between two memories, and "
            "'wipe' reads nothing.",
            "A new run begins if there is none, if the kind differs, or if the move's target, or a "
            "copy's source, was written in this run; then nothing is written yet.",
        ),
        tests=(
            "tests/test_cache.py::test_moves_that_clash_do_not_go_together",
            "tests/test_cache.py::test_moves_are_done_as_if_one_after_the_other",
        ),
    ),
    Task(
        number=5,
        file="scheduler.py",
        functions=("Scheduler._preempt",),
        title="give memory back and wait",
        text="Take the blocks of a running request and put it back in line, at the place of its "
        "arrival. Either its computed blocks move to the swap pool, or its keys and values are "
        "dropped and computed again; self._swaps decides. Its answer so far stays.",
        points=20,
        hints=(
            "Only computed tokens are worth swapping: pool.blocks_for(computed) blocks of the "
            "table.",
            "To swap: take blocks from the swap pool, add a Move('out', from, to) for each pair to "
            "the plan's moves, note the blocks in self.swapped. Else: computed is 0. Each way has "
            "its counter.",
            "Then release the table, remember the request in self._preempted, take it out of the "
            "running, move it to WAITING, and insert it into the line by arrival (insort with a "
            "key).",
        ),
        tests=(
            "tests/test_preemption.py::test_the_most_junior_gives_its_memory_back",
            "tests/test_preemption.py::"
            "test_the_senior_is_served_first_even_if_it_was_admitted_later",
            "tests/test_preemption.py::"
            "test_a_preempted_request_keeps_its_place_in_line_and_computes_all_it_has_again",
            "tests/test_preemption.py::"
            "test_without_chunks_a_recompute_longer_than_the_budget_still_runs",
            "tests/test_preemption.py::"
            "test_swapped_blocks_go_out_and_come_back_and_the_request_goes_on_where_it_was",
            "tests/test_preemption.py::"
            "test_only_computed_blocks_are_swapped_and_without_one_the_request_recomputes",
            "tests/test_preemption.py::"
            "test_swap_blocks_are_taken_if_there_is_room_and_given_back_after_an_abort",
        ),
    ),
    Task(
        number=6,
        file="scheduler.py",
        functions=("Scheduler._admit",),
        title="admit a request",
        text="Admit a waiting request if there is room, and return whether you did. Share its "
        "parent's blocks, or else those that the cache has of its tokens, take the others, and "
        "bring swapped ones back. Refuse, and change nothing, if the blocks are missing, if the "
        "watermark would not stay free beside others, or if an unchunked prompt does not fit the "
        "budget.",
        points=30,
        hints=(
            "At least one token must be computed, or there is nothing to sample after: the last "
            "one is never looked up. self._parents_blocks comes first, then self._lookup. With a "
            "parent, all tokens but the last are computed, and its last block, if it is not full, "
            "must be copied.",
            "Blocks that were found unowned were counted as available until now: they are needed "
            "too, and so is the block of a copy. `computed` is what the request has, or what was "
            "found, if that is more.",
            "In order: look up; count what is needed; refuse or go on; count the lookup for "
            "requests that were never preempted and have no parent's blocks; out of the line, "
            "RUNNING; adopt the blocks; a Move('copy', ...) of what table.replace returns, if "
            "needed, and counted; self._grow; a Move('in', ...) for each swapped block that was "
            "not found, and all of them back to the swap pool; set computed, and parent to None.",
        ),
        tests=(
            "tests/test_engine.py::test_the_whole_memory_of_a_small_crowd",
            "tests/test_scheduler.py::test_a_request_that_does_not_fit_waits_and_none_overtakes",
            "tests/test_scheduler.py::"
            "test_found_blocks_without_an_owner_are_not_counted_as_free_room_too",
            "tests/test_scheduler.py::test_the_watermark_stays_free_beside_others",
            "tests/test_scheduler.py::test_a_common_beginning_is_found",
            "tests/test_scheduler.py::test_without_chunks_a_prompt_over_the_budget_is_refused",
            "tests/test_preemption.py::"
            "test_a_copy_comes_from_the_parents_last_block_and_waits_for_one_of_its_own",
            "tests/test_preemption.py::test_what_can_still_be_found_is_shared_and_not_copied_back",
            "tests/test_preemption.py::"
            "test_samples_of_a_prompt_compute_it_once_and_share_its_full_blocks",
            "tests/test_preemption.py::"
            "test_a_preempted_request_finds_its_own_blocks_which_does_not_flatter_the_rate",
            "tests/test_engine.py::test_salts_keep_tenants_apart",
        ),
    ),
)
