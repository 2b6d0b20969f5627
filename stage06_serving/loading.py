"""What the server runs: a model and its engine. `--engine auto` takes the newest that is right on
this machine."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import catalog, cli, models, registry
from shared.errors import UserError
from shared.files import read_json
from stage01_forward.params import SamplingParams
from stage05_paged.memory import default_memory, free_memory, make_pool, parse_memory

from .settings import AUTO, KERNELS, OFF, PAGED, Settings

log = logging.getLogger(__name__)
BUDGET = 256  # tokens in a step, by default
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass
class Selection:
    """A loaded model and its engine's name for --engine, and why a faster one does not run here, if
    so."""

    loaded: cli.Loaded
    name: str
    reason: str
    linear: str  # the --linear of an engine without kernels
    automatic: bool

    def make(self, **options: Any) -> Any:
        """The engine, which alone may use the model. If the kernels do not support the model and
        were chosen automatically, stage 05's."""
        options = cli.cache_options(self.loaded.kv) | options
        if self.name == KERNELS:
            try:
                make = registry.load(registry.ENGINES[KERNELS])
                return make(self.loaded.model, insist=True, release=True, **options)
            except UserError as error:
                if not self.automatic:
                    raise
                self.name, self.reason = PAGED, str(error)
            from shared import linear  # here: it imports PyTorch, which takes seconds

            linear.optimize(self.loaded.model, self.linear)
        return registry.load(registry.ENGINES[PAGED])(self.loaded.model, **options)


def select(options: argparse.Namespace, name: str = AUTO) -> Selection:
    """Load the model of the options for --engine `name`; AUTO takes the kernels where they run
    correctly. Raises UserError for an engine that cannot run here."""
    device, dtype = cli.device_and_dtype(options)
    why = "" if name == PAGED else registry.load(registry.TRIALS[KERNELS])(dtype, device)
    if why and name == KERNELS:
        raise UserError(f"{why} Use --engine {AUTO} to get one that runs here.")
    engine = PAGED if why or name == PAGED else KERNELS
    wanted = options.linear
    layout = "plain" if engine == KERNELS else wanted  # kernels lay the weights out themselves
    loaded = cli.load_model_from(argparse.Namespace(**vars(options) | {"linear": layout}))
    return Selection(loaded, engine, why, wanted, name == AUTO)


@dataclass
class Served:
    """An engine, how it and its model were selected, and the sampling options of requests that do
    not give them."""

    engine: Any
    selection: Selection
    defaults: dict[str, Any]


def make_engine(settings: Settings) -> Served:
    """Raises UserError for a model that cannot be loaded, for an engine that cannot run here, and
    for lack of memory."""
    kind, draft = settings.speculate, settings.speculative_model
    if bool(draft) != (kind == "draft"):
        raise UserError(
            "--speculate draft and --speculative-model NAME need each other: give both or neither."
        )
    changed = {"seed": 0, "linear": "auto", "threads": settings.threads or None}
    selection = select(argparse.Namespace(**settings.model_dump() | changed), settings.engine)
    loaded = selection.loaded
    config, dtype, free = loaded.config, loaded.kv_dtype, free_memory(loaded.device)
    if loaded.tokenizer.eos_id not in (None, *config.eos_ids):
        log.warning(
            "Answers end at the ids %s, as the model's files say, and not at the tokenizer's %d: "
            "clients can add it as stop_token_ids.",
            *(config.eos_ids, loaded.tokenizer.eos_id),
        )
    memory = default_memory(config, dtype, settings.max_num_seqs, free)
    if settings.kv_memory:
        memory = parse_memory(settings.kv_memory, free)
    engine = selection.make(
        pool=make_pool(memory, config, dtype),
        sanitize=settings.sanitize,
        max_sequences=settings.max_num_seqs,
        token_budget=settings.max_num_batched_tokens or max(BUDGET, settings.max_num_seqs),
        policy="priority",
        prefix_caching=settings.enable_prefix_caching,
    )
    if kind != OFF:
        model = None
        if draft:
            weights = models.load(catalog.checked(draft))
            model = models.load_model(weights, loaded.device, loaded.dtype)
        speculate = registry.load(registry.DRAFTS[kind])
        engine = speculate(engine, kind, settings.num_speculative_tokens, model)
    return Served(engine, selection, sampling_defaults(settings, loaded.folder))


def sampling_defaults(settings: Settings, folder: Path | None) -> dict[str, Any]:
    """The sampling options of requests that do not give them: the server's, else those of the
    model's generation_config.json, else OpenAI's. Raises UserError for an invalid file."""
    file = folder / "generation_config.json" if folder else None
    kept = read_json(file) if file and file.exists() else {}
    fields = {name: kept[name] for name in SAMPLED if kept.get(name) is not None}
    try:
        SamplingParams(**fields)
    except UserError as error:
        why = str(error).removesuffix(".")
        raise UserError(f"{file} has a wrong value ({why}): correct it.") from None
    options = {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k")}
    given = {name: value for name, value in options.items() if value is not None}
    return {"temperature": 1.0, **fields, **given}
