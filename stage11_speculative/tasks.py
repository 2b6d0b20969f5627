"""The tasks of this stage, for `python -m shared.course.exercise`."""

from __future__ import annotations

from shared.task import Task

TASKS = (
    Task(
        number=1,
        file="proposers.py",
        functions=("NGram._of",),
        title="what came next the last time",
        text="Propose at most `count` tokens that may follow a request's. Take its last `longest` "
        "tokens; if they occurred before, propose what followed them the last time. If not, try "
        "one token fewer, down to `shortest`. `ends` maps each n-gram to the place behind it, and "
        "`indexed` is how many tokens it covers: a call adds only what is new.",
        points=15,
        hints=(
            "The n-grams at the very end are followed by nothing yet. May they be in `ends`?",
            "Add the n-grams that end at each new place but the last; then look the end up.",
            "What follows the n-gram at the place that the dictionary has, and how many tokens of "
            "it are wanted?",
        ),
        tests=("tests/test_engine.py::test_an_n_gram_is_continued_as_the_last_time",),
    ),
    Task(
        number=2,
        file="rejection.py",
        functions=("accept",),
        title="to accept or not",
        text="Decide whether a draft that was drawn from q is accepted for p, by a dart from 0 to "
        "below 1: with the probability min(1, p(draft) / q(draft)). A draft that p gives no chance "
        "is never accepted, even if rounding made q of it 0.",
        points=10,
        hints=(
            "What is the probability that a dart is below a number?",
            "What happens to the quotient where q is 0? By what can both sides be multiplied, so "
            "that there is none?",
        ),
        tests=("tests/test_rejection.py::test_a_draft_is_accepted_as_often_as_p_over_q",),
    ),
    Task(
        number=3,
        file="rejection.py",
        functions=("residual",),
        title="what is missing",
        text="Return the distribution from which a token is drawn after a refusal: what p has and "
        "q lacks, divided by its sum. If rounding leaves nothing, p.",
        points=15,
        hints=(
            "max(0, p - q), token by token.",
            "When p equals q there is no refusal but for rounding: any answer near p will do.",
        ),
        tests=("tests/test_rejection.py::test_the_residual_is_what_p_has_and_q_lacks",),
    ),
    Task(
        number=4,
        file="drafts.py",
        functions=("DraftScheduler.accept",),
        title="keep what was verified, give back the rest",
        text="After sampling, `plan.accepted` says how many drafts of each request were verified. "
        "Have the inner scheduler advance by them: only now may others find their blocks. Note the "
        "numbers in `lengths`, `draft_counts` and `histories`, and give back the blocks at the end "
        "of a table that the request's tokens do not need.",
        points=20,
        hints=(
            "`advance` of the inner scheduler takes a Plan of Work: what is its start, what its "
            "count?",
            "Every request with drafts must be noted, also one with none accepted.",
            "`pool.blocks_for(tokens)` is how many blocks it needs. The newest token has no keys "
            "yet, but will: is it one of them?",
        ),
        tests=(
            "tests/test_engine.py::test_blocks_of_refused_drafts_are_given_back",
            "tests/test_engine.py::test_no_other_request_finds_a_draft",
            "tests/test_engine.py::test_right_drafts_save_passes_and_wrong_ones_cost_none",
        ),
    ),
    Task(
        number=5,
        file="lengths.py",
        functions=("Adaptive.choose",),
        title="as many as pay",
        text="Choose how many of the proposed drafts of each request a pass verifies, so that the "
        "tokens expected a second are most: see the text of the file. The time that the tokens of "
        "prompts take in the pass does not count. In every PATIENCE-th pass in a row that would "
        "verify none of a request's drafts, though there were some, it tries one.",
        points=20,
        hints=(
            "A draft survives if it and all before it are accepted: rate ** (place + 1).",
            "Sort all drafts of all requests by that. For each number n, is the pass with the best "
            "n faster than the best so far? n = 0 is the first.",
            "Can a draft be among the best n, and the one before it not? What does that say of "
            "the chosen ones of a request?",
        ),
        tests=(
            "tests/test_proposers.py::test_lengths_follow_what_a_row_costs",
            "tests/test_proposers.py::test_no_other_choice_is_expected_to_be_faster",
            "tests/test_proposers.py::test_a_rate_is_learned_and_a_hopeless_request_tries_again",
        ),
    ),
    Task(
        number=6,
        file="grammar.py",
        functions=("FormRow._next",),
        title="the mask of a grammar",
        text="Return the mask (V,) of bool for the next token. `read` has the matcher follow the "
        "output, and `compute_bitmask` returns a bit for each id, the lowest of a byte first. A "
        "matcher that has failed allows nothing: note why in `error`. Behind MOST_DIGITS digits, "
        "no id that begins with one is allowed, unless there is no other.",
        points=20,
        hints=(
            "numpy.unpackbits has an order and a count: the last byte may have bits to spare.",
            "`is_error` is right only after the mask was computed.",
            "`grammars.digits` marks the ids that begin with a digit. What if the grammar allows "
            "no other?",
        ),
        tests=(
            "tests/test_grammar.py::test_a_mask_leaves_what_the_grammar_allows",
            "tests/test_grammar.py::test_white_space_is_bounded_and_digits_are_capped",
            "tests/test_grammar.py::test_a_parser_that_fails_ends_its_request_and_no_other",
        ),
    ),
)
