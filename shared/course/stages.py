"""Which stages there are. The only place where `shared` reaches a stage, and it does so by name at run time:
nothing in `shared` imports a stage when it is imported itself."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from ..paths import ROOT, discover


def engines() -> dict[str, Any]:
    """The Engine class of every stage that has one, in reading order."""
    names = [name for name in discover() if (ROOT / name / "engine.py").exists()]
    return {name: importlib.import_module(f"{name}.engine").Engine for name in names}


def oracle(model: Any) -> Any:
    """The engine of the first stage, which recomputes everything: what it says is right by definition."""
    return engines()[discover()[0]](model)


def sampling_params() -> Any:
    """The class SamplingParams, which the first stage defines and all others take."""
    return importlib.import_module(f"{discover()[0]}.sampling").SamplingParams


def load_model(checkpoint: Any, **options: Any) -> Any:
    """The one model of all stages, which the first defines."""
    return importlib.import_module(f"{discover()[0]}.model").load_model(checkpoint, **options)


def engine_in(name: str, model: Any, contexts: int) -> Any:
    """The engine of a stage with memory for `contexts` whole contexts, and as many sequences at a time as it can have in that."""
    made = engines()[name]
    if name == "stage03_batching":
        return made(model, max_batch=contexts)
    if name == "stage04_continuous":
        return made(
            model, scheduler=importlib.import_module(f"{name}.scheduler").Scheduler(contexts)
        )
    if name == "stage05_paged":
        pool = importlib.import_module(f"{name}.blocks").BlockPool(
            contexts * model.config.n_positions // 16, 16
        )
        return made(model, scheduler=importlib.import_module(f"{name}.scheduler").Scheduler(pool))
    return made(model)  # one sequence at a time


def run_all(
    engine: Any, prompts: Sequence[list[int]], sampling: Sequence[Any]
) -> Iterator[tuple[int, int]]:
    """Answer all `prompts` as fast as the engine of any stage can: together where it takes several, else one after the other.
    Yields (place of the prompt, token id), as soon as each token is there."""
    if hasattr(engine, "add"):  # from stage 04 on
        request = importlib.import_module("stage04_continuous.request").Request
        added = [
            engine.add(request(prompt, each))
            for prompt, each in zip(prompts, sampling, strict=True)
        ]
        place = {each.id: number for number, each in enumerate(added)}
        yield from ((place[name], token.id) for name, token in engine.run())
    elif hasattr(engine, "run"):  # stage 03
        output = importlib.import_module("stage01_forward.generation").Output
        outputs = [output(list(prompt)) for prompt in prompts]
        yield from ((number, token.id) for number, token in engine.run(outputs, list(sampling)))
    else:
        for number, (prompt, each) in enumerate(zip(prompts, sampling, strict=True)):
            yield from ((number, token.id) for token in engine.stream(prompt, each))
