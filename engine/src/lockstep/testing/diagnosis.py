"""Where two recorded runs part, and the likeliest cause; pure functions of what they recorded."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from lockstep.settings import counted

ROUNDING = 1e-5  # a relative difference below is one of the last digits of a float32
Line = Mapping[str, Any]  # what a rank has recorded of a step
Step = Sequence[Line]  # of all ranks
Recording = Mapping[int, Step]  # step -> its lines; the first has the weights to begin with


class Finding(NamedTuple):
    """The first difference between two runs, and what it tells."""

    step: int
    what: str  # the first tensor, or what else differs
    cause: str
    remedy: str

    def text(self) -> str:
        """Return three lines."""
        return (
            f"begins at: step {self.step}, {self.what}\ncause: {self.cause}\nremedy: {self.remedy}"
        )


def read_recording(folder: Path) -> Recording:
    """Return the steps that all ranks have recorded; of a repeated one, its last line."""
    ranks: list[dict[int, Line]] = []
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem)):
        lines = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()  # whole ones
        ranks.append(_latest(map(json.loads, lines)))
    if not ranks:
        return {}
    common = sorted(set(ranks[0]).intersection(*ranks))
    return {step: [rank[step] for rank in ranks] for step in common}


def _latest(lines: Iterable[Line]) -> dict[int, Line]:
    """Return the last line of each step; a start's has no micro-batch, and replaces none."""
    latest: dict[int, Line] = {}
    for line in lines:
        if line["micro_batches"] or line["step"] not in latest:
            latest[line["step"]] = line
    return latest


def diagnose(
    first: Recording,
    other: Recording,
    tolerance: float | None = None,
    killed: bool = False,
    batch: Mapping[str, Any] | None = None,
) -> Finding | None:
    """Return where a recorded run first differs from another one; None if it doesn't.

    Args:
        first: the recording of a run.
        other: that of another number of ranks, or of a run that was killed.
        tolerance: relative; None: the runs should have the same bits.
        killed: whether `other` was killed and resumed.
        batch: the settings of the batch that both had, so that no remedy is what is set already.
    """
    common = sorted({*first} & {*other})
    for step in common:
        pair = Pair(step, first[step], other[step], tolerance, batch or {})
        for find in (_in_samples, _in_noise, _in_loss, _in_gradients, _in_rates, _in_weights):
            finding = find(pair)
            if finding is not None:
                return _after_kill(finding) if killed else finding
    return None


class Pair(NamedTuple):
    """One step of two runs."""

    step: int
    first: Step
    other: Step
    tolerance: float | None
    batch: Mapping[str, Any] = MappingProxyType({})  # its settings

    @property
    def is_exact(self) -> bool:
        """Whether gradients are added in one order already."""
        return self.batch.get("exact_micro_size") is not None

    @property
    def has_micro_size(self) -> bool:
        """Whether the number of ranks should not change micro-batches."""
        return self.is_exact or self.batch.get("micro_size") is not None

    def finding(self, what: str, cause: str, remedy: str) -> Finding:
        """Return a finding of this step."""
        return Finding(self.step, what, cause, remedy)

    @property
    def both(self) -> tuple[Step, Step]:
        """The lines of both runs."""
        return self.first, self.other

    def is_near(self, ours: float, theirs: float, scale: float) -> bool:
        """Return whether two numbers are as equal as they should be."""
        if math.isnan(ours) and math.isnan(theirs):
            return True
        return abs(ours - theirs) <= (self.tolerance or 0.0) * scale or ours == theirs


def micro_batches(step: Step) -> list[Line]:
    """Return a step's micro-batches, in the order of ranks."""
    return [each for line in step for each in line["micro_batches"]]


def _in_samples(pair: Pair) -> Finding | None:
    """Compare which samples the step has, over all ranks, then which micro-batch has which."""
    lists = [
        [sample for each in micro_batches(step) for sample in each["samples"]] for step in pair.both
    ]
    ours, theirs = map(Counter, lists)
    if ours != theirs:
        other = sum((theirs - ours).values())
        twice = sum(count - 1 for count in theirs.values())
        what = f"the samples: {other} of {counted(len(lists[1]), 'sample')} are others"
        if len(lists[0]) != len(lists[1]):
            what = f"the samples: {len(lists[0])} and {len(lists[1])}"
        elif twice > sum(count - 1 for count in ours.values()):
            what += f", and {counted(twice, 'sample')} came twice"
        return pair.finding(
            what,
            "data by rank: which samples a step has depends on the number of ranks",
            "load with train_loader, or let each rank take its part of one order that all ranks "
            "compute from seed and step",
        )
    leaves = [[each["samples"] for each in micro_batches(step)] for step in pair.both]
    is_exact = pair.tolerance is None and len(leaves[0]) == len(leaves[1])
    if is_exact and leaves[0] != leaves[1]:
        number = _first_differing(*leaves)
        return pair.finding(
            f"the samples of micro-batch {number}: the step has the same ones in another order",
            "data by rank: the order of a step's samples depends on the number of ranks",
            "load with train_loader: micro-batch k of a step has the same samples on any rank",
        )
    return None


def _first_differing(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    """Return the number of the first pair that differs, counted from 1."""
    pairs = zip(ours, theirs, strict=True)
    return next(i for i, (our, their) in enumerate(pairs, 1) if our != their)


def _drawn(each: Line) -> set[str]:
    """Return the generators from which a micro-batch drew numbers."""
    after = each["after"]
    return {name for name, state in each["before"].items() if after.get(name) != state}


def _in_noise(pair: Pair) -> Finding | None:
    """Compare the states of the generators that micro-batches use, if these are the same ones."""
    ours, theirs = map(micro_batches, pair.both)
    if len(ours) != len(theirs):
        return None  # `_in_loss` tells whether noise is the cause
    losses = [[each.get("loss") for each in of_run] for of_run in (ours, theirs)]
    if losses[0] == losses[1] and _differing(pair, "gradients") is None:
        return None  # what was drawn has no effect
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True), 1):
        for name in sorted(_drawn(our) | _drawn(their)):
            before = our["before"].get(name) != their["before"].get(name)
            if our["after"].get(name) != their["after"].get(name):  # else the step has seeded it
                when = "begins with" if before else "leaves"
                return pair.finding(
                    f"random numbers: micro-batch {number} {when} another state of {name}'s "
                    "generator",
                    "dropout or other random numbers without seeds of their micro-batch: they "
                    "depend on the rank",
                    _remedy_of_noise(name),
                )
    return None


def _remedy_of_noise(name: str) -> str:
    if name in ("torch", "CUDA"):
        return (
            "list MicroBatchSeeds among the callbacks, and leave torch's generator as it seeds it: "
            "call no manual_seed with the rank, and draw in training_step only"
        )
    return (
        f"draw from {name}'s global generator in training_step only, and list MicroBatchSeeds, "
        "which seeds it; or draw in the dataset, from the sample's index"
    )


def _in_loss(pair: Pair) -> Finding | None:
    """Compare the losses of micro-batches if they have the same samples, else their mean."""
    leaves = [micro_batches(step) for step in pair.both]
    losses = [[each["loss"] for each in of_run if "loss" in each] for of_run in leaves]
    ours, theirs = losses
    is_same = len(ours) == len(theirs)
    where = "the loss"
    if is_same:
        pairs = enumerate(zip(ours, theirs, strict=True), 1)
        near = 8 * 2.0**-53  # Lightning has divided each by another number of micro-batches
        wrong = [
            (number, our, their)
            for number, (our, their) in pairs
            if not pair.is_near(our, their, abs(our)) and abs(our - their) > near * abs(our)
        ]
        if not wrong:
            return None
        number, our, their = wrong[0]
        where = f"the loss of micro-batch {number}"
    else:
        if not ours or not theirs:
            return None
        our, their = (sum(values) / len(values) for values in losses)
        if pair.is_near(our, their, abs(our)) or _differing(pair, "gradients") is None:
            return None  # micro-batches may count differently
    what = f"{where}: {our!r}, {their!r}, of the same samples and weights"
    return _of_computation(pair, what, our, their, is_same)


def _of_computation(pair: Pair, what: str, ours: float, theirs: float, is_same: bool) -> Finding:
    """Return why the same samples and weights give another loss."""
    norms = pair.first[0]["batch_norms"] or pair.other[0]["batch_norms"]
    draws = any(_drawn(each) for step in pair.both for each in micro_batches(step))
    if norms:
        return pair.finding(
            what,
            f"BatchNorm ({norms[0]}): its statistics are those of one rank's micro-batch",
            "use GroupNorm or LayerNorm, which see one sample; on GPUs with one micro-batch per "
            "step, trainer.sync_batchnorm=true",
        )
    if draws and not is_same:
        return pair.finding(
            what,
            "dropout or other random numbers: noise belongs to a micro-batch, and another number "
            "of ranks has other micro-batches",
            _remedy_of_size(pair),
        )
    if _is_rounding(ours, theirs, abs(ours)):
        return pair.finding(
            what,
            "rounding: kernels round in another way for other sizes or threads",
            _remedy_of_rounding(pair),
        )
    return pair.finding(
        what,
        "the module computes by rank: random numbers of a generator of its own, a value that "
        "depends on the rank or the time, or a loss that depends on the micro-batch's size",
        "let training_step depend on batch and weights only, draw random numbers from torch's own "
        "generator, and return the mean over samples",
    )


def _remedy_of_size(pair: Pair) -> str:
    if pair.has_micro_size:
        return (
            "load with train_loader and the batch: the loader's micro-batches don't have the size "
            "that batch fixes"
        )
    if pair.tolerance is None:
        return "set batch.exact_micro_size, which fixes them, or set dropout to 0 in this test"
    return "set batch.micro_size, which fixes them, or set dropout to 0 in this test"


def _remedy_of_rounding(pair: Pair) -> str:
    if pair.is_exact:
        return (
            "batch.exact_micro_size is set, and fixes sizes, threads, and the order of sums; look "
            "for what adds in another order: a hook, a callback, a size that the loader chooses, "
            "or a kernel (trainer.deterministic=true)"
        )
    return (
        "set batch.exact_micro_size for equal bits, which fixes sizes, threads, and the order of "
        "sums, or compare with a tolerance, such as 1e-12 with precision=64-true"
    )


def _is_rounding(ours: float, theirs: float, scale: float) -> bool:
    return abs(ours - theirs) <= ROUNDING * scale


def _differing(pair: Pair, kind: str) -> tuple[str, float, float, float] | None:
    """Return the first tensor that differs, two of its values, and its largest magnitude."""
    ours, theirs = (step[0].get(kind, {}) for step in pair.both)
    for name in {**ours, **theirs}:
        if name not in ours or name not in theirs:
            return name, math.nan, math.nan, math.nan
        found = _apart(pair, ours[name], theirs[name])
        if found is not None:
            return (name, *found)
    return None


def _apart(pair: Pair, ours: list[Any], theirs: list[Any]) -> tuple[float, float, float] | None:
    """Return two values of a tensor and its scale if it differs: the pair that is most apart."""
    if ours[0] == theirs[0]:
        return None
    scale = max(ours[1], theirs[1])
    pairs = [*zip(ours[2], theirs[2], strict=False), (ours[1], theirs[1])]
    our, their = max(pairs, key=lambda values: abs(values[0] - values[1]))
    if pair.tolerance is not None and pair.is_near(our, their, scale):
        return None
    return our, their, scale


def _in_gradients(pair: Pair) -> Finding | None:
    """Compare the complete gradients, before the update."""
    found = _differing(pair, "gradients")
    if found is None:
        return None
    name, ours, theirs, scale = found
    what = f"the gradient of {name}: {ours!r}, {theirs!r}, with equal losses"
    if math.isnan(scale):
        return pair.finding(
            f"the gradient of {name}, which one run has and the other has not",
            "a parameter that only some micro-batches use",
            "use it in each, or freeze it",
        )
    if _is_rounding(ours, theirs, scale):
        return pair.finding(
            what,
            "sums in another order: gradients differ in the last digits only",
            _remedy_of_rounding(pair),
        )
    return pair.finding(
        what,
        "gradients are changed, weighed, or added by rank: a hook, a callback, or a loss that is a "
        "sum over samples",
        "change gradients in on_before_optimizer_step, where they are complete, and return the "
        "mean over samples",
    )


def _in_rates(pair: Pair) -> Finding | None:
    """Compare the learning rates of the update, among ranks and between the runs."""
    tables = [[line.get("rates", []) for line in step] for step in pair.both]
    values = [(rank, rates) for table in tables for rank, rates in enumerate(table)]
    wrong = [(rank, rates) for rank, rates in values if rates != values[0][1]]
    if not wrong:
        return None
    rank, rates = wrong[0]
    of_ranks = any(rates != table[0] for table in tables for rates in table)
    cause = "a scheduler or optimizer by rank: ranks have different learning rates"
    if not of_ranks:
        cause = "a scheduler by rank: the learning rate depends on the number of ranks"
    both = zip(values[0][1], rates, strict=False)
    ours, theirs = next(((a, b) for a, b in both if a != b), (math.nan, math.nan))
    return pair.finding(
        f"the learning rate: {ours:g}, {theirs:g} on rank {rank}",
        cause,
        "compute it from the step, or from a Mean, which has the same value on any number of ranks",
    )


def _in_weights(pair: Pair) -> Finding | None:
    """Compare weights after the update among the ranks of a run, then between runs."""
    if "gradients" in pair.first[0]:
        when = "after the update"
        cause = "an optimizer by rank: gradients and rates are equal, and the update isn't"
        remedy = "let the update depend on gradients and step only, not on the rank or the time"
    else:
        when = "to begin with"
        cause = "initial weights by rank: random numbers without a seed, or of the rank"
        remedy = (
            "make weights with torch's generator in the module's __init__, and seed it before with "
            "the same number on all ranks: torch.manual_seed(1)"
        )
    for step in pair.both:
        for rank, line in enumerate(step[1:], 1):
            alone = Pair(pair.step, [step[0]], [line], None)
            found = _differing(alone, "weights")
            if found is not None:
                what = f"{found[0]} {when}: {found[1]!r} on rank 0, {found[2]!r} on rank {rank}"
                return pair.finding(what, cause, remedy)
    found = _differing(pair, "weights")
    if found is not None:
        what = f"{found[0]} {when}: {found[1]!r}, {found[2]!r}"
        return pair.finding(what, cause, remedy)
    found = _differing(pair, "buffers")
    if found is not None:
        return pair.finding(
            f"the buffer {found[0]} {when}: {found[1]!r}, {found[2]!r}, with equal weights",
            "a buffer by rank: it is computed from one rank's samples",
            "average it over ranks, or register it with persistent=False if no result needs it",
        )
    return None


def _after_kill(finding: Finding) -> Finding:
    """Return the finding with the cause that it has in a run that was killed."""
    if finding.cause.startswith("data"):
        cause = "data without a place: after a restart, the loader continues at another sample"
        remedy = "load with train_loader, which begins at the Trainer's step"
    elif finding.cause.startswith("dropout"):
        cause = "random numbers without seeds: after a restart, their generator begins anew"
        remedy = (
            "list MicroBatchSeeds among the callbacks, and leave torch's generator as it seeds it"
        )
    else:
        cause = "a state that isn't in the checkpoint: a value that the next step needs began anew"
        remedy = "keep it in a buffer, in the optimizer's state, or in a callback's state_dict"
    return Finding(finding.step, finding.what, cause, remedy)


def metric_finding(
    step: int, column: str, values: tuple[str, str], killed: bool = False, log: str = "metrics.csv"
) -> Finding:
    """Return what it means if a column of the log differs, and no weight does."""
    what = f"{column} of {log}: {values[0] or 'nothing'}, {values[1] or 'nothing'}"
    if killed:
        return Finding(
            step,
            what,
            "a metric that isn't in the checkpoint: weights and optimizer are equal; what the "
            "metric had before the restart is lost",
            "log it with Mean, or keep its values in a callback's state_dict",
        )
    if _differ_by_rounding(*values):
        return Finding(
            step,
            what,
            "rounding: weights and optimizer are equal; Lightning adds what is logged in the order "
            "of ranks",
            "log it with Mean, whose bits don't depend on ranks, or allow a log_tolerance of 1e-6",
        )
    return Finding(
        step,
        what,
        "a metric by rank: weights and optimizer are equal; the logged value is of one rank's "
        "samples, or of the last micro-batch of a step alone",
        "log it with Mean, which counts each micro-batch of a step on all ranks; sync_dist=True of "
        "self.log takes only the last one of each rank",
    )


def _differ_by_rounding(ours: str, theirs: str) -> bool:
    try:
        return math.isclose(float(ours), float(theirs), rel_tol=ROUNDING)
    except ValueError:  # one is missing
        return False
