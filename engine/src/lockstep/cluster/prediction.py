"""Predictions of one run for several numbers of devices, and the assumptions behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from lockstep.batch import Batch
from lockstep.building import build
from lockstep.cluster.choices import AUTO, DDP, tensor_parallel
from lockstep.cluster.fitting import Remedy, Room
from lockstep.cluster.hardware import Hardware
from lockstep.cluster.memory import Memory, States
from lockstep.cluster.sharing import muon_matrices
from lockstep.cluster.step_time import (
    BACKWARD_SHARE,
    StepTime,
    Work,
    buckets,
    step_time,
)
from lockstep.cluster.tracing import AUTOCAST
from lockstep.errors import UserError
from lockstep.muon.orthogonalization import flops_of
from lockstep.run.planned_pauses import saves_after, validations_after
from lockstep.schedule import scaled_lr
from lockstep.tokens.recipe import recipe_of
from lockstep.tokens.tokenizer import ByteTokenizer
from lockstep.tokens.tokenizer_files import GPT2, GPT2_SIZE

TOKENS_PER_PARAMETER = 20  # compute-optimal (Hoffmann et al. 2022, table 3)
LINEAR_RANGE = 32  # from a batch of 256 to 8,192 images (Goyal et al. 2017, figure 1)
COMPRESSION = {"fp16": 0.5, "bf16": 0.5}  # strategy.comm_hook


@dataclass(frozen=True)
class Pauses:
    """How often a run validates and saves, and how many seconds each takes."""

    validations: int
    validation: float | None  # None: without `val_tokens`, its size is unknown
    saves: int
    save: float

    def share(self, training: float) -> float:
        """Return the fraction of a run whose steps take `training` seconds together."""
        seconds = self.validations * (self.validation or 0.0) + self.saves * self.save
        return seconds / (training + seconds)


@dataclass(frozen=True)
class Row:
    """The prediction for one number of devices."""

    batch: Batch
    lr: float  # peak, scaled by lr_scaling
    memory: Memory
    fits: bool
    largest_micro_size: int
    remedies: list[Remedy]  # if it does not fit
    time: StepTime
    tokens_per_second: float
    efficiency: float  # tokens per second per device, as a fraction of a single device's
    seconds: float  # of the steps until `tokens` are reached
    pauses: Pauses  # between them
    cost: float | None


@dataclass(frozen=True)
class Plan:
    """Predictions for all numbers of devices, and the assumptions behind them."""

    hardware: Hardware
    precision: str
    vocab_size: int
    block_size: int
    parameters: int
    flops_per_token: int
    gradient_bytes: int
    buckets: int  # of the all-reduce; 0: states are sharded, so gradients are scattered
    tokens: float
    chinchilla_tokens: float
    scaling: str
    rows: list[Row]
    refused: dict[int, str]  # number of devices -> why a run cannot use it
    notes: list[str]
    vocabulary: str = ""  # where it comes from
    budget: str = ""  # where the tokens come from


def predict(
    config: DictConfig,
    hardware: Hardware,
    world_sizes: Sequence[int],
    scaling: str | None = None,
    tokens: float | None = None,
    price: float | None = None,
    vocab_size: int | None = None,
) -> Plan:
    """Predict the run of `config` on each number of devices.

    Args:
        config: the run's settings; its own number of devices is ignored.
        hardware: the devices and their links.
        world_sizes: numbers of devices.
        scaling: strong or weak; None: strong if `batch.global_size` is set.
        tokens: the tokens that time and cost are for; None: the Chinchilla point.
        price: of a device for an hour.
        vocab_size: None: that of the data.

    Raises:
        UserError: the device's speed in this precision is unknown.
    """
    hardware.flops(config.precision)  # fails early
    vocab_size = vocab_size or vocabulary(config.data)
    room = Room.of(config, hardware, vocab_size)
    model = room.model
    work = _work(room)
    planner = _Planner(room, work)
    chinchilla = TOKENS_PER_PARAMETER * model.num_parameters
    kind, batch = planner.scaled(world_sizes, scaling)
    rows, refused = planner.rows(world_sizes, batch, tokens or chinchilla, price)
    notes = [*_notes(room), *_lr_note(config, rows)]
    return Plan(
        hardware=hardware,
        precision=config.precision,
        vocab_size=vocab_size,
        block_size=config.model.block_size,
        parameters=model.num_parameters,
        flops_per_token=model.flops_per_token,
        gradient_bytes=work.states.gradients,
        buckets=0 if work.sharing else len(buckets(work.gradients, work.bucket_cap_mb)),
        tokens=tokens or chinchilla,
        chinchilla_tokens=chinchilla,
        scaling=kind,
        rows=rows,
        refused=refused,
        notes=notes,
    )


def vocabulary(data: DictConfig) -> int:
    """Return the number of token ids in `data`; read its corpus only if settings do not say."""
    if "source" not in data:
        raise UserError(
            f"data._target_={data.get('_target_')} has no source that tells how many tokens there "
            "are; choose another data, such as data=stdlib"
        )
    node = data.source
    size: int | None = node.get("vocab_size")
    tokenizer = node.get("tokenizer")
    if size is None and tokenizer == ByteTokenizer.kind:
        size = ByteTokenizer.vocab_size
    if size is None and tokenizer in GPT2:
        size = GPT2_SIZE  # a plan doesn't need its files
    if size is None:
        size = _size_of_source(node)
    return size


def _size_of_source(node: DictConfig) -> int:
    missing = sorted(OmegaConf.missing_keys(node))
    if missing:
        raise UserError(f"{missing[0]}=??? leaves the text open; set it")
    source = build(node)
    size: int | None = getattr(source, "vocab_size", None)
    return size or recipe_of(source).tokenizer.vocab_size


def _work(room: Room) -> Work:
    config = room.config
    model = room.model
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return Work(
        layers=config.model.n_layer,
        block_size=config.model.block_size,
        flops_per_token=model.flops_per_token,
        gradients=[weight.nbytes for weight in trained],
        states=room.alone.states,
        precision=config.precision,
        bucket_cap_mb=config.strategy.get("bucket_cap_mb", 25),
        compression=COMPRESSION.get(config.strategy.get("comm_hook", "none"), 1.0),
        clips=config.clip_norm is not None,
        muon_flops=sum(flops_of(tuple(each.shape)) for each in muon_matrices(config, model)),
        sharing=room.sharing,
        ownership=room.ownership,
        tensor_sums=_tensor_sums(room),
    )


def pauses(
    config: DictConfig,
    batch: Batch,
    time: StepTime,
    states: States,
    hardware: Hardware,
    steps: float,
) -> Pauses:
    """Return the pauses of a run of that many steps.

    A validation is the forward pass of `val_tokens`, divided among all devices. A save copies
    weights and moments from rank 0's device to the host; unless `checkpoint.background` is true, it
    also waits for the disk. Each validation counts as the best so far.
    """
    last = math.ceil(steps)
    size = states.weights + states.optimizer
    save = size / hardware.host_link.bandwidth
    if not config.checkpoint.background:
        save += size / hardware.disk
    validation = None
    tokens = config.val_tokens
    if tokens is not None:
        of_step = batch.global_size * config.model.block_size
        micro_batches = math.ceil(tokens / (of_step / batch.accumulation))
        forward = (1 - BACKWARD_SHARE) * time.compute / batch.accumulation
        validation = micro_batches * forward
    keeps_best = config.checkpoint.keep_best > 0
    saves = saves_after(0, config.checkpoint.every, config.val_every, last, keeps_best=keeps_best)
    return Pauses(validations_after(0, config.val_every, last), validation, saves, save)


def _tensor_sums(room: Room) -> int:
    """Return the bytes that tensor ranks add up for each token, all of them width C.

    Each block adds twice in forward and twice in backward, each table of embeddings in forward, and
    the head in backward.
    """
    config = room.config
    if tensor_parallel(config) == 1:
        return 0
    size = 2 if config.precision in AUTOCAST else 4
    tables = 2 if config.model.get("ngram_rows") else 1
    return int((4 * config.model.n_layer + tables + 1) * config.model.n_embd * size)


def _notes(room: Room) -> list[str]:
    """Return notes on what the prediction leaves out, and on a faster precision."""
    config = room.config
    hardware = room.hardware
    notes = []
    if config.trainer.get("accelerator") == "cpu" and hardware.accelerator != "cpu":
        notes.append(
            f"trainer=cpu, but this plan is for {hardware.name}; for this machine: doctor "
            "--save-profile profile.json, then plan --hardware profile.json"
        )
    if not room.sharing and config.strategy.get("_target_") not in (AUTO, DDP):
        notes.append("this strategy is planned as ddp: every rank has the whole model")
    if config.strategy.get("comm_hook") == "powersgd":
        notes.append("strategy.comm_hook=powersgd is planned without its compression")
    if tensor_parallel(config) > 1:
        notes.append(
            f"strategy.tensor_parallel={tensor_parallel(config)}: all of its sums are exposed, and "
            "memory is planned as if each rank computed whole layers"
        )
    if config.compile:
        notes.append("compile=true keeps fewer activations than planned (for eager mode)")
    if config.precision == "32-true" and "bf16" in hardware.peak:
        gain = hardware.peak["bf16"] / hardware.flops("32-true")
        notes.append(f"precision=bf16-mixed has {gain:.1f} times the peak of 32-true here")
    return notes


def _lr_note(config: DictConfig, rows: Sequence[Row]) -> list[str]:
    """Note if linear scaling leaves the range in which it was found."""
    growth = max((row.lr / config.optim.lr for row in rows), default=1.0)
    if config.lr_scaling != "linear" or growth <= LINEAR_RANGE:
        return []
    return [
        f"lr_scaling=linear multiplies the rate by up to {growth:,.0f}; it was shown to work "
        f"up to {LINEAR_RANGE} (Goyal et al. 2017, figure 1): use sqrt, or fix batch.global_size"
    ]


@dataclass(frozen=True)
class _Planner:
    room: Room
    work: Work

    def scaled(self, world_sizes: Sequence[int], scaling: str | None) -> tuple[str, Batch]:
        """Return the kind of scaling, and the batch, which grows only if that is asked for."""
        configured = self.room.config.batch
        batch: Batch = build(configured)
        if batch.grows:
            return "weak", batch
        if scaling != "weak" or batch.is_exact:
            return "strong", batch
        several = [world_size for world_size in sorted(world_sizes) if world_size > 1]
        fitting = filter(None, map(self.room.largest_micro_size, several or [1]))
        size = configured.get("micro_size") or min(batch.global_size, next(fitting, 1))
        return "weak", Batch(micro_size=size, reference_size=batch.reference_size)

    def _spread(self, world_size: int, batch: Batch) -> Batch:
        devices = min(world_size, self.room.hardware.devices_per_node)
        if world_size % devices:
            raise UserError(
                f"{world_size} devices are not a whole number of nodes of {devices} each; set "
                "--per-node"
            )
        nodes = world_size // devices
        return batch.spread_over(devices, nodes, tensor_parallel(self.room.config))

    def rows(
        self, world_sizes: Sequence[int], batch: Batch, tokens: float, price: float | None
    ) -> tuple[list[Row], dict[int, str]]:
        """Predict each number of devices that a run can use; return the errors of all others."""
        one = batch.spread_over(1)
        base = self._tokens(one) / step_time(self.work, one, self.room.hardware).total
        rows: list[Row] = []
        refused: dict[int, str] = {}
        for world_size in world_sizes:
            try:
                spread = self._spread(world_size, batch)
                rows.append(self._row(spread, base, tokens, price))
            except UserError as error:
                refused[world_size] = str(error)
        return rows, refused

    def _tokens(self, batch: Batch) -> int:
        """Return the tokens of a step."""
        return batch.global_size * int(self.room.config.model.block_size)

    def _row(self, batch: Batch, base: float, tokens: float, price: float | None) -> Row:
        config = self.room.config
        memory = self.room.memory(batch.micro_size, batch.world_size)
        fits = memory.total <= self.room.hardware.memory
        time = step_time(self.work, batch, self.room.hardware)
        speed = self._tokens(batch) / time.total
        seconds = tokens / speed
        cost = None
        if price is not None:
            cost = tokens / speed / 3600 * batch.world_size * price
        return Row(
            batch=batch,
            lr=scaled_lr(config.optim.lr, batch, config.lr_scaling),
            memory=memory,
            fits=fits,
            largest_micro_size=self.room.largest_micro_size(batch.world_size),
            remedies=[] if fits else self.room.remedies(batch),
            time=time,
            tokens_per_second=speed,
            efficiency=speed / (batch.world_size * base),
            seconds=seconds,
            pauses=pauses(
                config,
                batch,
                time,
                self.work.states,
                self.room.hardware,
                steps=tokens / self._tokens(batch),
            ),
            cost=cost,
        )
