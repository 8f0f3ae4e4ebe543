"""Which kernels compute a run on a CPU: decided once, at its start, and then kept.

None is the fastest on all processors. On AMD's, oneDNN multiplies float32 matrices twice as fast as
MKL. On Intel's, both are about equally fast, but torch's fused attention is several times slower
with oneDNN. Some processors multiply bfloat16 twice as fast as float32, and some half as fast.

So what is open is measured, for half a second, at the run's shape: first layers, then Muon's
products, then threads. The first two use one thread, so that they don't depend on the number of
ranks. A rule decides where nothing is measured, or where the measurement finds little difference.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from lockstep_gpt.config import Config
from lockstep_gpt.distributed.ranks import from_each_rank, from_rank_zero, is_rank_zero
from lockstep_gpt.model import cpu_kernels
from lockstep_gpt.model.cpu_kernels import SHORT, CpuKernels, name_of_products
from lockstep_gpt.model.functional import PRODUCTS_OF_GPUS, choose_matrix_products
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.training import kernel_timing, remembered
from lockstep_gpt.training.kernel_settings import ATTENTION, NEWTON_SCHULZ
from lockstep_gpt.training.kernel_timing import LONGEST_PLAIN, Candidate, Shape

logger = logging.getLogger(__name__)

# What the receipt calls Muon's forms.
FORMS = {"bfloat16": "bfloat16", "float32": "float32", "gram": "float32 on Gram matrices"}
PRECISIONS = ("32-true", "bf16-mixed")  # that a CPU has a choice of kernels for


def decided(config: Config, directory: RunDirectory | None = None) -> Config:
    """Return `config` with the kernels of its CPUs, the same on all ranks; all ranks call this.

    Rank 0 measures what is open, and keeps it in the run's `directory`.
    """
    if config.trainer["accelerator"] != "cpu":
        return config
    is_exact = all(from_each_rank(cpu_kernels.onednn_is_exact()))
    decisions: dict[str, Any] = {}
    if is_rank_zero() and directory is not None:
        decisions = directory.decisions()  # of ranks that these replace
    if is_rank_zero() and not decisions:
        decisions = decide(config, is_exact)
        if directory is not None and decisions["settings"] != _settings_of(config):
            with directory.writing():
                directory.keep_decisions(decisions)
    settings = from_rank_zero(decisions)["settings"]
    kernels = replace(config.kernels, **settings["kernels"])
    return replace(config, precision=settings["precision"], kernels=kernels)


def decide(config: Config, is_exact: bool) -> dict[str, Any]:
    """Return the `settings` that are decided, and what was `measured` for that, as plain values.

    Args:
        config: what is set in it stays.
        is_exact: whether oneDNN's float32 products are exact enough on all ranks.
    """
    rule = _rule(config, is_exact)
    if not _is_measured(config):
        return {"settings": _settings_of(config, rule), "measured": {}}
    shape = Shape(config.model.n_embd, config.model.n_head, config.model.block_size)
    candidates = _candidates(config, rule, is_exact)
    forms = _forms(config)
    subject = {
        "shape": asdict(shape),
        "candidates": [*map(str, candidates)],
        "rule": str(rule),
        "newton_schulz": forms,
    }
    found = remembered.recall(subject)
    if found is None:
        found = remembered.remember(subject, _measured(shape, candidates, rule, forms))
    chosen = next(each for each in candidates if str(each) == found["chosen"])
    settings = _settings_of(config, chosen)
    settings["kernels"]["newton_schulz"] = found["newton_schulz"]
    if config.kernels.threads is None:
        settings["kernels"]["threads"] = _threads(config, shape, chosen)
    return {"settings": settings, "measured": found["measured"]}


def _measured(
    shape: Shape, candidates: list[Candidate], rule: Candidate, forms: list[str]
) -> dict[str, Any]:
    """Return the fastest candidate and form, and the microseconds that each takes."""
    chosen = rule
    measured = {}
    if len(candidates) > 1:
        seconds = kernel_timing.layer_seconds(shape, candidates)
        chosen = kernel_timing.fastest(seconds, rule)
        measured = {str(each): round(1e6 * took, 2) for each, took in seconds.items()}
    form = forms[0] if forms else None
    if len(forms) > 1:
        with cpu_kernels.restored_afterward():
            cpu_kernels.use_products(chosen.products)
            seconds_of_forms = kernel_timing.newton_schulz_seconds(shape, forms)
        form = min(forms, key=lambda each: seconds_of_forms[each])
    return {"chosen": str(chosen), "newton_schulz": form, "measured": measured}


def _is_measured(config: Config) -> bool:
    """Return whether this run decides by measuring what is open.

    With exact sums, runs have equal bits whenever they start, so no measurement may decide.
    """
    is_timed = config.precision in (*PRECISIONS, "auto")
    return config.kernels.measure and is_timed and config.batch.exact_micro_size is None


def _rule(config: Config, is_exact: bool) -> Candidate:
    """Return what computes where nothing is measured."""
    products = "onednn" if is_exact else "blas"
    attention = "plain" if config.model.block_size <= SHORT else "fused"
    precision = "32-true" if config.precision == "auto" else config.precision
    kernels = config.kernels
    if kernels.products is not None and (is_exact or kernels.products == "blas"):
        products = kernels.products
    elif kernels.products is not None:
        logger.warning(
            "kernels.products=onednn would round to bfloat16 on a processor of this run; it uses "
            "kernels.products=blas"
        )
    return Candidate(products, kernels.attention or attention, precision)


def _candidates(config: Config, rule: Candidate, is_exact: bool) -> list[Candidate]:
    """Return all ways to compute a layer that the settings leave open, the rule's first."""
    products = [rule.products]
    if config.kernels.products is None and is_exact:
        products = ["onednn", "blas"]
    attention = [rule.attention]
    if config.kernels.attention is None and config.model.block_size <= LONGEST_PLAIN:
        attention = [*ATTENTION]
    precisions = [rule.precision]
    if config.precision == "auto":
        precisions = [*PRECISIONS]
    found = [rule]
    for precision in precisions:
        # bfloat16 products don't depend on the library for float32.
        of_precision = products if precision == "32-true" else [rule.products]
        found += [
            Candidate(each, kernel, precision) for each in of_precision for kernel in attention
        ]
    return [*dict.fromkeys(found)]


def _forms(config: Config) -> list[str]:
    """Return the forms of Newton-Schulz that are open; none if there is no Muon."""
    if config.optim.algorithm != "muon":
        return []
    form = config.kernels.newton_schulz
    return [*NEWTON_SCHULZ] if form is None else [form]


def _threads(config: Config, shape: Shape, chosen: Candidate) -> int:
    """Return the number of threads per rank: fewer than it has if that is clearly faster."""
    most = torch.get_num_threads()
    if is_busy():  # then fewer threads can seem faster, or more
        return most
    samples = config.batch.micro_size or config.batch.global_size or 1
    seconds = kernel_timing.thread_seconds(shape, samples, chosen, most)
    return kernel_timing.fewest_threads(seconds)


def is_busy() -> bool:
    """Return whether other programs have used much of this machine in the last minute."""
    cores = os.cpu_count() or 1
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > cores / 2


def _settings_of(config: Config, chosen: Candidate | None = None) -> dict[str, Any]:
    """Return the settings that are decided here, with those of a candidate."""
    kernels = asdict(config.kernels)
    settings: dict[str, Any] = {"precision": config.precision, "kernels": kernels}
    if chosen is not None:
        settings["precision"] = chosen.precision
        settings["kernels"] |= {"products": chosen.products, "attention": chosen.attention}
    return settings


def use(config: Config) -> None:
    """Compute with the kernels of a `config` that `decided` has returned, from now on."""
    kernels = config.kernels
    if config.trainer["accelerator"] != "cpu":
        choose_matrix_products(config.trainer["accelerator"])
        return
    assert kernels.products is not None, "not decided"
    cpu_kernels.use_products(kernels.products)
    longest_plain = config.model.block_size if kernels.attention == "plain" else 0
    cpu_kernels.use(CpuKernels(longest_plain, kernels.newton_schulz))
    if kernels.threads is not None:
        torch.set_num_threads(kernels.threads)


def receipt_line(config: Config, measured: Mapping[str, float]) -> str:
    """Return what the receipt says of the kernels in use, and of what was measured."""
    accelerator = config.trainer["accelerator"]
    if accelerator != "cpu":
        return f"matrix products by {PRODUCTS_OF_GPUS[accelerator]}"
    kernels = config.kernels
    assert kernels.products is not None, "not decided"
    parts = [f"matrix products by {name_of_products(kernels.products)}"]
    if kernels.newton_schulz is not None:
        parts.append(f"Newton-Schulz in {FORMS[kernels.newton_schulz]}")
    if measured:
        times = ", ".join(f"{name} {each:.1f}" for name, each in measured.items())
        parts.append(f"measured, in us per token and layer: {times}")
    return "; ".join(parts)
