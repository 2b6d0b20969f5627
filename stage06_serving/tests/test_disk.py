"""The prefix cache on a disk: what is read equals what would be computed, nothing else is ever
found, and no fault of a disk fails a request.

Real servers, each on a real folder. Those of `house` share a process, but no memory for blocks.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
import time
from contextlib import suppress

import pytest
import torch

from shared.config import Config
from shared.errors import UserError
from shared.testing import FIELDS, random_checkpoint
from stage04_continuous.request import Request
from stage05_paged.blocks import BlockPool, BlockTable
from stage05_paged.planes import Planes
from stage06_serving import disk
from stage06_serving.__main__ import make_engine
from stage06_serving.blockfiles import HEADER, SUFFIX, UNFINISHED, VERSION, BlockFiles
from stage06_serving.disk import DiskStore
from stage06_serving.settings import parse

from .asking import bearer, post, read_metrics, until, until_idle
from .conftest import VARIABLE, checkpoint, serving
from .faulty_server import Fault
from .tools import alone, prompt_of, words

IDS = prompt_of(100)  # six full blocks and four tokens
PROMPTS = [prompt_of(200, seed) for seed in range(1, 7)]
BLOCKS = 6
HITS = "vllm:external_prefix_cache_hits_total"
QUERIES = "vllm:external_prefix_cache_queries_total"
READ, WRITTEN, REJECTED, DROPPED = (
    f"staircase:prefix_disk_{name}_total"
    for name in ("read_bytes", "written_bytes", "rejected", "dropped")
)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "prefixes"


@pytest.fixture
def options(tiny_folder, folder):
    """The command line of a server with the folder, in float64."""
    memory = ["--kv-memory", "1MiB", "--dtype", "float64"]
    return ["--model", str(tiny_folder), *memory, "--prefix-cache-dir", str(folder)]


def ask(server, ids=IDS, key="none", **fields):
    """The tokens of an answer to `ids`."""
    body = {"prompt": ids, "max_tokens": 5, "temperature": 0, "ignore_eos": True, **fields}
    answer = post(server, json=body | {"return_token_ids": True}, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def files(folder):
    """The finished files, the first block of a chain first."""
    return sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: -path.stat().st_mtime)


def fill(server, folder, count=BLOCKS):
    """The answer to IDS, once all its full blocks are in files."""
    tokens = ask(server)
    until(lambda: len(files(folder)) == count)
    return tokens


def size_of(folder):
    """Bytes of its files, while a thread writes and renames them."""
    sizes = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return sum(sizes)


def leave(folder):
    """A file that an older server had begun."""
    path = folder / f"{'a' * 64}.left{UNFINISHED}"
    path.write_bytes(b"half")
    os.utime(path, (0, 0))
    return path


def test_a_killed_server_starts_again_with_its_prefixes(options, folder, house):
    """What it was writing is lost, and nothing else."""
    with serving(*options) as server:
        tokens = fill(server, folder)
        kept = sum(path.stat().st_size for path in files(folder))
        until(lambda: read_metrics(server)[WRITTEN] >= kept)
        before = read_metrics(server)
        assert before[QUERIES] == 96 and not before[HITS] and not before[READ]
        assert f"disk    {folder}" in server.stderr()
        last = [(ids, ask(server, ids, max_tokens=1)) for ids in PROMPTS[:2]]
        server.process.kill()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in files(folder)} == {0o600}
    unfinished = leave(folder)
    server = house(*options)
    assert ask(server) == tokens
    after = until_idle(server)
    assert after[HITS] == after["vllm:prefix_cache_hits_total"] == 96
    assert after["vllm:prompt_tokens_total"] == 4  # computed
    assert after[READ] == before[WRITTEN] and not after[WRITTEN]
    assert ask(server) == tokens and read_metrics(server)[READ] == after[READ]  # from memory
    assert [ask(server, ids, max_tokens=1) for ids, _ in last] == [tokens for _, tokens in last]
    assert not until_idle(server)[REJECTED] and not unfinished.exists()


def test_another_server_finds_the_blocks_of_the_kernels_too(options, folder, house):
    options += ["--engine", "kernels"]
    tokens, other = fill(house(*options), folder), house(*options)
    assert ask(other) == tokens and until_idle(other)[HITS] == 96


def test_only_the_same_blocks_are_found(options, folder, house, tmp_path):
    """Not those of another tenant, other weights, another dtype, block size or engine; a prompt
    that is scored leaves none."""
    tokens = fill(house(*options), folder)
    keys = {"STAIRCASE_API_KEY": "first, second"}
    config = Config.from_dict(FIELDS | {"n_positions": 256})
    tensors = random_checkpoint(config, spread=15.0).tensors
    others = checkpoint(tmp_path / "others", tensors, n_positions=256)
    for more in (
        ["--model", str(others)],
        ["--dtype", "float32"],
        ["--block-size", "8"],
        ["--engine", "kernels"],
    ):
        server = house(*options, *more)
        ask(server)
        numbers = until_idle(server)
        assert numbers[QUERIES] and not numbers[HITS] and not numbers[READ], more
    until(lambda: len(files(folder)) == 4 * BLOCKS + 13)  # with the answer, 13 blocks of 8
    count, server = len(files(folder)), house(*options, env=keys)
    assert ask(server, key="first") == tokens
    until(lambda: len(files(folder)) == count + BLOCKS)
    assert ask(server, key="second") == tokens
    until(lambda: len(files(folder)) == count + 2 * BLOCKS)
    assert not read_metrics(server, "first")[HITS]
    again = house(*options, env=keys)
    assert ask(again, key="second") == tokens and read_metrics(again, "first")[HITS] == 96
    ask(again, key="second", echo=True, logprobs=1, max_tokens=1)
    time.sleep(0.2)
    assert len(files(folder)) == count + 2 * BLOCKS


def flip(content):
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


def other_ids(content):
    place = HEADER.size + 3
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGE = {
    "one bit of the content": flip,
    "one bit of the tokens": other_ids,
    "another version": lambda content: b"S" + content[1:],
    "cut off": lambda content: content[:-1],
    "empty": lambda content: b"",
    "longer": lambda content: content + b"\0",
    "all zeros": lambda content: bytes(len(content)),
}


def test_a_damaged_file_is_a_miss_and_is_written_again(options, folder, house):
    assert len(VERSION) == 18  # as in the header
    tokens = fill(house(*options), folder)
    path = files(folder)[2]
    right = path.read_bytes()
    swapped = {"another block's": lambda content: files(folder)[-1].read_bytes()}
    for what, damage in (DAMAGE | swapped).items():
        path.write_bytes(damage(right))
        server = house(*options)
        assert ask(server) == tokens, what
        numbers = until_idle(server)
        assert (numbers[REJECTED], numbers[HITS]) == (1, 32), what
        until(lambda: path.exists() and path.read_bytes() == right)
    path.unlink()  # as another server does
    server = house(*options)
    assert ask(server) == tokens and until_idle(server)[HITS] == 32
    assert not read_metrics(server)[REJECTED]


@pytest.mark.slow
def test_servers_killed_while_they_write_lose_nothing_else(options, folder, house):
    killed = []
    for place in range(3):
        with serving(*options) as server:
            killed += [(ids, ask(server, ids, max_tokens=1)) for ids in PROMPTS[2 * place :][:2]]
            server.process.kill()
    unfinished = leave(folder)
    server = house(*options)
    for ids, tokens in killed:
        assert ask(server, ids, max_tokens=1) == tokens
    assert not until_idle(server)[REJECTED]
    assert not unfinished.exists()


@pytest.mark.parametrize(
    "more, words",
    [
        (["--prefix-cache-size", "100"], "a block takes"),
        (["--prefix-cache-size", "much"], "not a valid size"),
        (["--no-enable-prefix-caching"], "leave one of them out"),
        (["--prefix-cache-dir", __file__], "cannot be written"),
        (["--prefix-cache-dir", "~no-such-user/prefixes"], "cannot be written"),
        (["--prefix-cache-dir", "{open}"], "is open to other users"),
    ],
)
def test_what_cannot_work_is_one_sentence_at_the_start(more, words, options, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    more = [word.format(open=tmp_path / "open") for word in more]
    with pytest.raises(UserError, match=words):
        make_engine(parse([*options, *more]))


def test_a_disk_that_fails_later_is_a_warning(options, folder, house, tmp_path):
    server = house(*options)
    fill(server, folder)
    shutil.rmtree(folder)
    tokens = ask(server, prompt_of(100, 1))
    until(lambda: read_metrics(server)[DROPPED] >= BLOCKS)
    assert ask(server, prompt_of(100, 1)) == tokens
    assert server.stderr().count("cannot be written (No such file") == 1
    folder.mkdir(0o700)
    ask(server, prompt_of(100, 2))
    until(lambda: len(files(folder)) == BLOCKS)


@pytest.mark.skipif(sys.platform != "linux", reason="sets the limit of another process")
def test_a_full_disk_is_a_warning(options, folder):
    """A limit for the size of a file stands for the disk: the same error in the same places."""
    with serving(*options, "--block-size", "64", "--max-num-batched-tokens", "64") as server:
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (9000, 9000))
        ask(server, prompt_of(200))
        until(lambda: read_metrics(server)[DROPPED] == 3)
        assert ask(server, prompt_of(200)) and not list(folder.iterdir())
        assert server.stderr().count("cannot be written (File too large)") == 1


def test_the_blocks_of_a_failed_request_are_removed(options, folder, house, tmp_path):
    """What is in them is unknown."""
    fault = Fault(tmp_path / "fault")
    server = house(*options, env={VARIABLE: str(fault.file)})
    fill(server, folder)
    fault.plant("once")
    assert post(server, json={"prompt": IDS, "max_tokens": 3}).status_code == 500
    until(lambda: not any(folder.glob(f"*{SUFFIX}")))


# ---- without HTTP -------------------------------------------------------------------------------


def test_other_files_in_the_folder_stay_and_do_not_count(folder):
    folder.mkdir()
    others = [folder / name for name in (f"letter{UNFINISHED}", f"notes{SUFFIX}")]
    for path in others:
        path.write_bytes(bytes(10_000))
        os.utime(path, (0, 0))
    made = BlockFiles(folder, 3 * (HEADER.size + 16), b"", 8, 8)
    for digest in (b"a", b"b", b"c", b"d"):
        made.write(digest, bytes(8), time.time(), [memoryview(bytes(8))])
    assert all(path.exists() for path in others)
    assert b"d" in made and len(files(folder)) - 1 == made.counts.total_bytes // made.file_bytes > 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_on_a_full_disk_the_oldest_blocks_make_room(folder, monkeypatch):
    """Once for each block: other programs may have filled the disk."""
    folder.mkdir()
    made = BlockFiles(folder, 2**20, b"", 8, 8)

    def write(digest):
        made.write(digest, bytes(8), ord(digest), [memoryview(bytes(8))])

    def on_full_disk(times, mkstemp=tempfile.mkstemp):
        def make(*arguments):
            nonlocal times
            times -= 1
            number, name = mkstemp(*arguments)
            if times >= 0:
                os.close(number)
                number = os.open("/dev/full", os.O_WRONLY)
            return number, name

        monkeypatch.setattr(tempfile, "mkstemp", make)

    for digest in (b"a", b"b", b"c"):
        write(digest)
    on_full_disk(1)
    write(b"d")
    assert [digest in made for digest in (b"a", b"b", b"c", b"d")] == [False, True, True, True]
    on_full_disk(2)
    with pytest.raises(OSError, match="No space left"):
        write(b"e")
    assert [digest in made for digest in (b"b", b"c", b"d", b"e")] == [False, True, True, False]
    assert made.counts.total_bytes == 2 * made.file_bytes and len(list(folder.iterdir())) == 2


def test_what_is_written_does_not_change_with_its_block(folder):
    """A cache of one layer has each block in one piece."""
    planes = Planes([torch.zeros(2, 3)], [])
    parts = store_of(folder, BlockPool(2, 4), planes)._copy(1)
    planes.planes[0][1] = 7
    assert parts and not any(map(any, parts))


def store_of(folder, pool, memory, most=1000):
    """A store of at most so many files."""
    folder.mkdir(exist_ok=True)
    ids, content = 8 * pool.block_size, memory.bytes_per_block
    files = BlockFiles(folder, most * (HEADER.size + ids + content), b"", ids, content)
    return DiskStore(files, pool, memory)


@pytest.fixture
def stored(engine, folder):
    """make(most, **options): an engine that checks its memory after every step, with the folder."""

    def make(most=1000, **options):
        made = engine(**options).engine
        pool, memory = made.scheduler.pool, made.runner.runner.cache.memory
        made.scheduler.store = store_of(folder, pool, memory, most)
        made.observers.append(made.scheduler.store)
        return made

    return make


def test_the_least_recently_used_go_first_and_the_end_of_a_prompt_first(
    stored, folder, monkeypatch
):
    """A prompt that is always found in memory is used, too."""
    monkeypatch.setattr(disk, "RESCAN", 0.0)
    made = stored(most=40)
    store, hot = made.scheduler.store, prompt_of(42)  # 10 blocks

    def run(prompt):
        made.generate([prompt], words(1))
        until(lambda: len(made.steps) and store._offers.empty())
        assert size_of(folder) <= store.files.cap

    for seed in range(1, 8):
        run(hot)
        run(prompt_of(42, seed))
    until(lambda: store.counts.written_bytes == 80 * store.files.file_bytes)

    def known(prompt):
        digests = BlockTable(made.scheduler.pool).digest(prompt)
        return [digest in store.files for digest in digests]

    assert all(known(hot)) and all(known(prompt_of(42, 7))) and not any(known(prompt_of(42, 1)))
    for seed in range(1, 8):
        assert known(prompt_of(42, seed)) == sorted(known(prompt_of(42, seed)), reverse=True)


def test_short_memory_and_many_requests_give_the_same_tokens(stored, tiny_model, folder):
    """Preemption, eviction and reads at once. Each engine finds what the last one wrote."""
    heads = [prompt_of(24, seed) for seed in range(4)]
    prompts = [heads[seed % 4] + prompt_of(1 + seed % 9, 7 + seed) for seed in range(24)]
    expected = [alone(tiny_model, prompt, words(6)) for prompt in prompts]
    hits = []
    for blocks in (12, 20, 60):
        made = stored(blocks=blocks)
        requests = [made.add(Request(prompt, words(6))) for prompt in prompts]
        while made.requests:
            made.step()
        assert [request.output.token_ids for request in requests] == expected
        until(made.scheduler.store._offers.empty)
        hits.append(made.scheduler.store.counts.hits)
        assert not made.scheduler.store.counts.rejected
    assert hits[1] and hits[2] >= 24


def test_a_disk_that_stands_still_delays_no_prompt_for_long(
    stored, tiny_model, folder, monkeypatch
):
    monkeypatch.setattr(disk, "PATIENCE", 0.05)
    prompt, made = prompt_of(40), stored()
    expected = made.generate([prompt], words(4))[0].token_ids
    until(lambda: len(files(folder)) == 10)
    path = files(folder)[0]
    path.unlink()
    os.mkfifo(path)  # to open it waits for a writer, as for a disk
    made = stored()
    for _ in range(2):
        assert made.generate([prompt], words(4))[0].token_ids == expected
    assert not made.scheduler.store.counts.read_bytes
    os.close(os.open(path, os.O_WRONLY))  # the reader goes on: it finds an empty file
    until(lambda: made.scheduler.store.counts.rejected)


def test_others_run_while_a_request_waits_for_its_blocks(stored, tiny_model, folder, monkeypatch):
    monkeypatch.setattr(disk, "PATIENCE", 60.0)
    prompt, other = prompt_of(40), prompt_of(9, 3)
    expected = [alone(tiny_model, ids, words(4)) for ids in (prompt, other)]
    made = stored()
    made.generate([prompt], words(4))
    until(lambda: len(files(folder)) == 10)
    right = files(folder)[0].read_bytes()
    path = files(folder)[0]
    path.unlink()
    os.mkfifo(path)
    made = stored()
    waits, leaves = (made.add(Request(prompt, words(4))) for _ in range(2))
    runs = made.add(Request(other, words(4)))
    while runs.output.finish_reason is None:
        made.step()
    assert runs.output.token_ids == expected[1] and not waits.computed
    made.abort(leaves.id)
    path.write_bytes(right)  # the reader gets all of it from the pipe
    while made.requests:
        made.step()
    assert waits.output.token_ids == expected[0] and made.scheduler.store.counts.hits == 36


def test_a_cache_of_two_planes(folder):
    """A block is all of its planes, whatever is in them."""

    def make():
        shapes = {torch.int8: (8, 3, 5), torch.bfloat16: (8, 2)}
        planes = [torch.zeros(shape, dtype=dtype) for dtype, shape in shapes.items()]
        pool = BlockPool(8, 4)
        return pool, Planes(planes, planes), store_of(folder, pool, Planes(planes, planes))

    request = Request(prompt_of(12), words(1))
    pool, memory, store = make()
    table = BlockTable(pool)
    table.grow(12)
    for plane in memory.planes:
        plane.copy_(torch.randn(plane.shape) * 50)
    for index, digest in enumerate(table.digest(request.prompt_ids)):
        pool.publish(table.blocks[index], digest)
        store.offer(request, index, table.blocks[index], digest)
    until(lambda: len(files(folder)) == 3)
    contents = memory.read(table.blocks)
    pool, memory, store = make()
    pool.take()  # so that the blocks have other numbers
    assert store.loading(request, table.digests, 0)
    request.move(request.state.WAITING)
    until(lambda: (store.after(disk.Plan()), not store.loading(request, table.digests, 0))[1])
    blocks = pool.match(table.digests)
    assert blocks != table.blocks and torch.equal(memory.read(blocks), contents)
    assert store.counts.hits == 12


def test_what_was_evicted_before_it_was_written_is_dropped(folder):
    planes = Planes([torch.zeros(2, 2, 4)], [])
    pool = BlockPool(2, 4)
    store = store_of(folder, pool, planes)
    entry = disk.Entry(b"d" * 32, b"i" * 32, block=0)
    store._newest[0] = entry
    store._offers.put(entry)  # the pool does not know it any more
    until(lambda: store.counts.dropped == 1)
    assert not list(folder.iterdir())
