"""What attention in place does not depend on, and what it refuses."""

from __future__ import annotations

import mmap
import os
import sys

import pytest
import torch

from shared.testing import python
from stage05_paged.cache import PagedCache
from stage08_llama.config import LlamaConfig
from stage09_kernels.cache import KernelCache
from stage09_kernels.tests.test_naive import TOLERANCE, EmulatedCache

BLOCKS = 360


def caches(heads, kv_heads, width, block, dtype, blocks=BLOCKS, kind=KernelCache):
    """Stage 05's cache in float64, and another, in which slots without a token are NaN."""
    config = LlamaConfig(11, 4096, heads * width, 2, heads, kv_heads, width)
    kernel = kind(config, blocks, block, dtype=dtype)
    kernel.kv.fill_(torch.nan)
    return PagedCache(config, blocks, block, dtype=torch.float64), kernel


def compare(output, paged, layer, *inputs, tolerances=TOLERANCE):
    """`output` with what stage 05 computes in float64 for the same pass."""
    assert output.dtype == inputs[0].dtype
    wanted = torch.empty(output.shape, dtype=torch.float64)
    wanted[paged.order] = paged.attend(layer, *(x.cpu().double()[paged.order] for x in inputs))
    tolerance = tolerances[output.dtype]
    torch.testing.assert_close(output.cpu().double(), wanted, atol=tolerance, rtol=tolerance)


def in_all_ways(make_cache, kv_heads, dtype=torch.float32):
    """The outputs for a sequence of 300 tokens, and the caches: alone and whole, in pieces beside
    others, by one thread and by more threads than there are items."""
    torch.manual_seed(1)
    shapes = [(300, heads, 64) for heads in (6, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    decoded = [200, *[1] * 100]  # into the second chunk of 256 keys
    for count, cuts, others in (1, [300], 0), (2, [1, 7, 292], 3), (3, decoded, 1), (16, [300], 0):
        torch.set_num_threads(count)
        kernel, start, parts = make_cache(), 0, []
        for cut in cuts:
            extra = [([*range(300 + 20 * i, 320 + 20 * i)], 0, 3 + i) for i in range(others)]
            noise = sum(share[2] for share in extra)
            beside = [1000 * torch.randn(noise, *shape[1:]).to(dtype) for shape in shapes]
            piece = [x[start : start + cut] for x in (q, k, v)]
            mixed = [torch.cat(pair) for pair in zip(beside, piece, strict=True)]
            shares = [*extra, (list(range(300)), start, cut)]
            parts.append(kernel.extend(shares).attend(0, *mixed)[noise:])
            start += cut
        yield torch.cat(parts), kernel


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize(
    ("dtype", "cached", "kind"),
    [
        (torch.float32, torch.float32, KernelCache),
        (torch.bfloat16, torch.bfloat16, KernelCache),
        (torch.float32, torch.bfloat16, KernelCache),
        (torch.float32, torch.bfloat16, EmulatedCache),  # tiles; one query takes vectors
    ],
)
def test_bits_depend_on_no_neighbour_chunk_block_or_thread(dtype, cached, kind, kv_heads):
    """Outputs in float32 show every bit of what a bfloat16 cache gives. Tokens pair by their
    positions, even where two of a pair lie in two blocks."""
    made = (caches(6, kv_heads, 64, size, cached, kind=kind)[1] for size in (16, 1, 7, 33))
    outputs = [output for output, _ in in_all_ways(made.__next__, kv_heads, dtype)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_slots_that_no_token_has_written_change_no_bit(dtype):
    """Whatever is in them and in the blocks of others. Two sequences share the blocks of their
    prefix. Nothing is aligned to more than a number."""
    torch.manual_seed(3)
    inputs = torch.randn(31, 8 * 24 + 1).to(dtype)[:, 1:].unflatten(1, (8, 24))
    q, k, v = inputs[:, :4], inputs[:, 4:6], inputs[:, 6:]
    prefix, tables = [9, 4], ([9, 4, 7], [9, 4, 2, 11])
    steps = [[(prefix, 0, 14)], [(tables[0], 14, 5), (tables[1], 14, 12)], [([8, 5, 3], 20, 1)]]
    outputs = []
    for other in (0.0, torch.nan, torch.inf, -torch.inf):
        oracle, kernel = caches(4, 2, 24, 7, dtype)
        room = torch.full((kernel.kv.numel() + 98,), 7.0, dtype=dtype)  # with guards around it
        kernel.kv = room[49:-49].view(kernel.kv.shape).fill_(other)
        several = []
        for shares, rows in zip(steps, (slice(14), slice(14, 31), slice(15, 16)), strict=True):
            if shares == steps[2]:  # first those that the last one sees
                seen = [x[:20] for x in (q, k, v)]
                kernel.extend([([8, 5, 3], 0, 20)]).attend(1, *seen)
                oracle.extend([([8, 5, 3], 0, 20)]).attend(1, *(x.double() for x in seen))
            several.append(kernel.extend(shares).attend(1, q[rows], k[rows], v[rows]))
            compare(several[-1], oracle.extend(shares), 1, q[rows], k[rows], v[rows])
        assert (room[:49] == 7).all() and (room[-49:] == 7).all()
        outputs.append(torch.cat(several))
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_a_table_that_changed_since_the_last_pass_is_read_anew():
    """Its list is the same object and as long as before: one block came in another's place."""
    oracle, kernel = caches(2, 2, 16, 16, torch.float32)
    first, table = torch.randn(3, 43, 2, 16), [3, 5, 7]
    kernel.extend([(table, 0, 40), ([8], 0, 3)]).attend(0, *first)
    oracle.extend([([3, 5, 9], 0, 40)]).attend(0, *first[:, :40].double())
    kernel.kv[0, 9] = kernel.kv[0, 7]
    kernel.kv[0, 7] = torch.nan
    table[2] = 9
    inputs, shares = torch.randn(3, 1, 2, 16), [(table, 40, 1)]
    compare(kernel.extend(shares).attend(0, *inputs), oracle.extend(shares), 0, *inputs)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows reserves memory before it is touched")
def test_a_cache_of_more_than_two_billion_numbers():
    """8 GiB of which a few pages are touched. Block 4 begins at number 2^32, 0 in 32 bits."""
    _, kernel = caches(1, 1, 16, 16, torch.bfloat16)
    lazily = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory, numbers = mmap.mmap(-1, 2 * (2**32 + 4096), lazily), kernel.kv.shape[-1]
    kernel.kv = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided(
        (1, 5, 1, numbers), (0, 2**30, numbers, 1)
    )
    q, k, v = torch.randn(3, 2, 1, 16).bfloat16()
    for place in (0, 1):  # equal keys weigh the same
        shares = [([0], place, 1), ([4], place, 1)]
        assert torch.equal(kernel.extend(shares).attend(0, q, k, v), v)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_does_not_wait_for_threads_that_it_has_not():
    program = """
import os, signal, torch, warnings
from stage09_kernels.tests.test_naive import F64, KernelCache, attentions
warnings.simplefilter("ignore")
case = 32, 1, 16, [50, 9, 120]
(output, _), _ = attentions((*case, 2), KernelCache, F64, F64)
child = os.fork()
if not child:
    signal.alarm(30)
    torch.set_num_threads = lambda count: None  # as the fork left them
    (again, _), _ = attentions((*case, 2), KernelCache, F64, F64)
    os._exit(7 * output.equal(again))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = python("-c", program)
    assert done.stdout == "7\n", done.stderr


@pytest.mark.parametrize("block", [-2, BLOCKS])
def test_a_block_outside_the_cache_is_refused(block):
    _, kernel = caches(2, 2, 16, 16, torch.float32)
    with pytest.raises(ValueError, match="a block outside"):
        kernel.extend([([block], 0, 1)])
    with pytest.raises(ValueError, match="no place for 5 tokens at 12"):
        kernel.extend([([0], 12, 5)])
