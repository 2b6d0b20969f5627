"""The tasks of this stage, for `python -m shared.course.exercise`."""

from __future__ import annotations

from shared.task import Task

ROUTING, SHARD = "tests/test_routing.py", "tests/test_shard.py"
TRIES, LEASES = "tests/test_tries.py", "tests/test_leases.py"

TASKS = (
    Task(
        number=1,
        file="router/routing.py",
        functions=("Routing.choose",),
        title="which replica",
        text="Return the route of a request, or None if no replica can take it. Of the replicas "
        "that are ready and not in `without`, the candidates are those that have some of the "
        "prompt, and two of all at random. Skip those with at least `bound` times the mean number "
        "of requests in flight, unless all have that many. Choose the cheapest, by tokens that it "
        "must compute plus its tokens in flight; break ties at random. Change no count.",
        points=25,
        hints=(
            "`replica.match(digests)` counts blocks. The last token is always computed, so at most "
            "(tokens - 1) // block_size of them help.",
            "Count the new request in the mean, and round the bound up: an idle fleet has room "
            "everywhere.",
            "What can `min` compare besides the cost, so that equal ones are chosen at random? "
            "Does the order of your candidates depend on where objects are in memory?",
        ),
        tests=(
            f"{ROUTING}::test_the_longest_cached_prefix_is_found",
            f"{ROUTING}::test_the_last_token_is_always_computed",
            f"{ROUTING}::test_a_long_queue_outweighs_a_short_prefix",
            f"{ROUTING}::test_one_hot_prefix_does_not_end_affinity_for_all",
            f"{ROUTING}::test_several_routers_do_not_dilute_the_bound",
            f"{ROUTING}::test_ties_are_broken_at_random",
            f"{ROUTING}::test_without_a_prefix_the_less_busy_of_two_is_chosen",
            f"{ROUTING}::test_a_replica_that_is_not_ready_keeps_its_load_and_its_tree",
            f"{ROUTING}::test_failed_and_absent_replicas_are_not_chosen",
        ),
    ),
    Task(
        number=2,
        file="tensor/shard.py",
        functions=("shards",),
        title="rows and columns",
        text="For each layer in LAYERS, return which rows (outputs) and columns (inputs) of its "
        "weight (out, in) this rank holds: channels of its own query heads, of its heads of keys "
        "and values, or of its part of the MLP; None for all. c_attn stacks queries, keys and "
        "values.",
        points=20,
        hints=(
            "A layer's last two names are its key in LAYERS: what its outputs count, and what its "
            "inputs count.",
            "Head h has channels h * head_dim to (h + 1) * head_dim; `heads_of` gives the heads.",
            "c_attn stacks three matrices. How many ranges of its rows does a rank hold?",
        ),
        tests=(f"{SHARD}::test_the_logits_of_all_ranks_are_those_of_the_whole",),
    ),
    Task(
        number=3,
        file="router/relay.py",
        functions=("Relay._tries",),
        title="when to try again",
        text="Have a replica answer (`_try`). If that raises Failed, try another one, but at most "
        "TRIES in all, and only if the budget holds a whole retry, which each further try costs; "
        "after a death (`Failed.died`) it costs nothing. Count retries. A request is in flight on "
        "a replica from before the try to its end, however it ends. If no replica is left, send "
        "the last failure, or busy(FULL) if there was none.",
        points=20,
        hints=(
            "`choose` takes the replicas that were tried already.",
            "`start` before the try, `finish` in a finally.",
            "Before which tries is the budget looked at, and which of those cost nothing?",
        ),
        tests=(
            f"{TRIES}::test_another_replica_answers_in_place_of_one_that_failed",
            f"{TRIES}::test_a_request_has_two_tries_and_ends_with_the_last_failure",
            f"{TRIES}::test_without_budget_there_is_no_second_try",
            f"{TRIES}::test_a_death_needs_no_budget_and_still_has_one_second_try",
            f"{TRIES}::test_no_replica_left_is_the_last_failure_and_none_at_all_is_full",
            f"{TRIES}::test_what_is_cut_off_is_no_longer_in_flight",
        ),
    ),
    Task(
        number=4,
        file="disaggregated/leases.py",
        functions=("Disaggregated._copy",),
        title="a valid copy",
        text="Copy the leased blocks that this engine's prefix cache lacks, as far as there is "
        "room. Return whether the copies are what was leased: the lease has not expired, and no "
        "leased block was taken for something else in the meantime. Only then publish them. In the "
        "end the cache holds the blocks, and no table does: give them back from the last to the "
        "first, so that the end of a chain is evicted before its beginning.",
        points=15,
        hints=(
            "Share the blocks that match before you take others, which could evict them.",
            "A generation read before the copy proves nothing about it.",
            "`pool.take` owns a block, as `pool.share` does. Which blocks have to be given back?",
        ),
        tests=(
            f"{LEASES}::test_the_tokens_are_those_of_one_engine",
            f"{LEASES}::test_a_lease_that_has_expired_fails_its_request",
            f"{LEASES}::test_no_answer_comes_from_blocks_that_were_freed",
        ),
    ),
    Task(
        number=5,
        file="tensor/ring.py",
        functions=("all_reduce",),
        title="an all-reduce around a ring",
        text="Add up the tensors of all ranks, so that every rank has the sum, equal to the last "
        "bit. A rank can only exchange: it sends a piece to the next rank, and gets one from the "
        "rank before. It may do so 2 (size - 1) times, with a `size`-th of the tensor at most "
        "(rounded up). The size of the tensor need not be a multiple; x does not change.",
        points=20,
        hints=(
            "If all numbers went round, each rank would send size - 1 tensors. How much must it "
            "send if each rank is to finish only one piece of the sum?",
            "After the first turn, which piece has two summands, and on which rank? Which one does "
            "that rank pass on next?",
            "Which piece is finished on which rank after size - 1 turns? What is left to do, and "
            "why is nothing added then?",
        ),
        tests=(
            "tests/test_ring.py::test_every_rank_has_the_sum",
            "tests/test_ring.py::test_each_rank_sends_less_than_two_tensors",
            "tests/test_ring.py::test_the_sum_comes_by_the_ring",
        ),
    ),
)
