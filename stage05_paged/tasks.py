"""The tasks of this stage, for `python -m shared.course.exercise`: what to write, hints, points, and the tests that judge it."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="blocks.py",
        functions=("BlockPool.take", "BlockPool.share", "BlockPool.give_back"),
        title="take, share, give back",
        text="Write the three calls that move a block between free, cached and owned. `take` gives a free block, or evicts the "
        "cached one that was used longest ago; `share` is one table more, `give_back` one less, and with the last one the "
        "block becomes cached if it was published, and free if not. Each takes constant time, and RuntimeError says what "
        "cannot be.",
        points=20,
        hints=(
            "A block is in one place of three: in self.free, in self.cached, or with references above 0. Every call keeps that "
            "true.",
            "self.free is a stack. self.cached is an OrderedDict with the least recently used first: popitem(last=False) "
            "evicts. An evicted block must be forgotten, and the eviction counted.",
            "share may be asked for a cached block, which then leaves the cache; a free one is an error. self.shared counts the "
            "blocks with two references or more: it changes when a count reaches 2, or falls to 1.",
        ),
        tests=(
            "tests/test_blocks.py::test_all_blocks_are_given_once_and_come_back",
            "tests/test_blocks.py::test_taking_and_giving_back_takes_constant_time",
            "tests/test_blocks.py::test_a_block_is_not_given_back_twice",
            "tests/test_blocks.py::test_a_free_block_cannot_be_shared",
            "tests/test_blocks.py::test_a_published_block_is_kept_when_no_table_holds_it_and_can_be_shared_again",
            "tests/test_blocks.py::test_the_least_recently_used_block_is_evicted_first_and_after_the_free_ones",
            "tests/test_blocks.py::test_an_evicted_block_is_no_longer_found",
        ),
    ),
    Task(
        number=2,
        file="blocks.py",
        functions=("BlockTable.replace",),
        title="copy-on-write",
        text="Put an own block in place of the shared one at a position, and return (old, new), so that the content can be "
        "copied before it is written.",
        points=5,
        hints=(
            "Position p lies in blocks[p // block_size].",
            "Take before you give back: the other way round, the pool might hand out the very block that you have just let go "
            "of.",
            "Take a block from the pool, put it into the table, give the old one back, return both numbers.",
        ),
        tests=(
            "tests/test_blocks.py::test_a_table_that_writes_to_a_shared_block_gets_its_own",
            "tests/test_engine.py::test_fork_of_a_fork",
        ),
    ),
    Task(
        number=3,
        file="blocks.py",
        functions=("BlockTable.digest",),
        title="names of full blocks",
        text="Work out the digests of the full blocks of `tokens`, which follow the blocks digested so far, and return all "
        "digests. It must be right whatever the pieces in which tokens are handed over, and never hash a token twice.",
        points=10,
        hints=(
            "`chain` makes a digest of its parent's and the tokens of one block. Tokens beyond the last full block are left "
            "alone.",
            "The parent is the last digest there is. Before there is any, it is the SHA-256 of the salt.",
            "Go through `tokens` in steps of the block size, as long as a whole block is left, and append to self.digests.",
        ),
        tests=(
            "tests/test_blocks.py::test_digests_are_worked_out_once_a_full_block_and_whatever_the_pieces",
            "tests/test_blocks.py::test_other_salts_find_nothing",
        ),
    ),
    Task(
        number=4,
        file="cache.py",
        functions=("batches",),
        title="moves that go together",
        text="Cut a list of moves into runs that one operator can do: of one kind, in order, and none that needs what an "
        "earlier move of its run has written, or writes where one has written.",
        points=15,
        hints=(
            "Go through the moves in order, and note which blocks the present run has written.",
            "Only a copy reads where the others write: 'out' and 'in' go between two memories, and 'wipe' reads nothing.",
            "A new run begins if there is none, if the kind differs, or if the move's target, or a copy's source, was written "
            "in this run; then nothing is written yet.",
        ),
        tests=(
            "tests/test_cache.py::test_moves_that_clash_do_not_go_together",
            "tests/test_cache.py::test_moves_are_done_as_if_one_after_the_other",
        ),
    ),
    Task(
        number=5,
        file="scheduler.py",
        functions=("Scheduler.preempt",),
        title="give memory back and wait",
        text="Take the blocks of a running request away and send it back in line, at the place of its arrival. Either its "
        "computed blocks move to the swap pool, or its keys and values are thrown away and computed again; self._swaps "
        "says which. What it has said stays said.",
        points=20,
        hints=(
            "Only what is computed is worth swapping: pool.blocks_for(computed) blocks of the table.",
            "To swap: take blocks from the swap pool, add a Move('out', from, to) for each pair, note the blocks in "
            "self.swapped. Else: computed is 0. Each way has its counter.",
            "Then release the table, remember the request in self._preempted, take it out of the running, move it to WAITING, "
            "and put it back into the line by arrival (insort with a key).",
        ),
        tests=(
            "tests/test_preemption.py::test_a_preempted_request_keeps_its_place_in_line_and_computes_all_it_has_again",
            "tests/test_preemption.py::test_swapped_blocks_go_out_and_come_back_and_the_request_goes_on_where_it_was",
            "tests/test_preemption.py::test_only_the_computed_blocks_are_swapped",
            "tests/test_preemption.py::test_swap_that_finds_no_room_recomputes",
            "tests/test_engine.py::test_preemption_never_repeats_or_loses_a_streamed_token",
        ),
    ),
    Task(
        number=6,
        file="scheduler.py",
        functions=("Scheduler._admit",),
        title="let a request in",
        text="Let a waiting request in if there is room, and say whether you did. Find what is known of its tokens, share those "
        "blocks, take the others, and bring swapped ones back. Refuse, and change nothing, if the blocks are not there, if "
        "the watermark would not stay free beside others, or if an unchunked prompt does not fit the budget.",
        points=30,
        hints=(
            "At least one token must be computed, or there is nothing to sample after: the last one is never looked up. For a "
            "request that was swapped out, nothing beyond what it had computed counts.",
            "Blocks that are found and that nobody holds were counted as available until now: they are needed too. `computed` "
            "is what it has, or what was found, if that is more.",
            "In order: look up; count what is needed; refuse or go on; count the lookup for requests that were never preempted; "
            "out of the line, RUNNING; adopt what was found; self._grow; a Move('in', ...) for each swapped block that was not "
            "found, and all of them back to the swap pool; set computed.",
        ),
        tests=(
            "tests/test_scheduler.py::test_a_request_is_admitted_with_blocks_for_what_it_has_and_not_for_what_may_come",
            "tests/test_scheduler.py::test_a_request_that_does_not_fit_waits_and_none_overtakes",
            "tests/test_scheduler.py::test_the_watermark_stays_free_beside_others",
            "tests/test_scheduler.py::test_a_common_beginning_is_found",
            "tests/test_scheduler.py::test_found_blocks_without_an_owner_are_not_counted_as_free_room_too",
            "tests/test_preemption.py::test_what_can_still_be_found_is_shared_and_not_copied_back",
            "tests/test_engine.py::test_a_whole_prompt_found_still_computes_its_last_token",
            "tests/test_engine.py::test_a_preempted_request_resumes_on_its_own_prefix",
        ),
    ),
)
