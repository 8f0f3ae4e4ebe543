"""Predictions of one run for several numbers of devices, and the assumptions behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.batch import Batch
from lockstep.errors import UserError
from lockstep.muon.orthogonalization import flops_of
from lockstep.plan.counting import sample_bytes
from lockstep.plan.hardware import Hardware, find_hardware
from lockstep.plan.memory import Memory, Remedy, Room
from lockstep.plan.step_time import BACKWARD_SHARE, StepTime, Work, buckets, step_time
from lockstep.plan.training import States, Training
from lockstep.run.planned_pauses import saves_after, validations_after
from lockstep.schedule import scaled_lr

SHARDING = "strategy=fsdp2"
SHARDED = ("32-true", "bf16-mixed")  # precisions for which shards work
TOKENS_PER_PARAMETER = 20  # compute-optimal (Hoffmann et al. 2022, table 3)
LINEAR_RANGE = 32  # from a batch of 256 to 8,192 images (Goyal et al. 2017, figure 1)
COMPRESSION = {"fp16": 0.5, "bf16": 0.5}  # comm_hook


@dataclass(frozen=True)
class Rate:
    """The learning rate at `batch.reference_size`, and how it grows with the batch."""

    peak: float
    scaling: str = "linear"  # linear, sqrt, or none


@dataclass(frozen=True)
class Tokens:
    """What only runs of a language model have."""

    per_sample: int
    vocab_size: int
    vocabulary: str = ""  # where it comes from
    budget: str = ""  # where the number of the run's samples comes from


@dataclass(frozen=True)
class Rhythm:
    """How often a run stops to validate and to save."""

    val_every: int  # steps
    val_samples: int | None  # None: unknown
    save_every: int | None  # steps; None: only at the end, and the best
    keeps_best: bool = True
    in_background: bool = False  # the disk is written while training goes on

    def pauses(
        self, batch: Batch, time: StepTime, states: States, hardware: Hardware, steps: float
    ) -> Pauses:
        """Return the pauses of a run of that many steps.

        A validation is the forward pass of its samples, divided among all devices. A save copies
        weights and moments from rank 0's device to the host, and waits for the disk unless that
        happens in the background. Each validation counts as the best so far.
        """
        last = math.ceil(steps)
        size = states.weights + states.optimizer
        save = size / hardware.host_link.bandwidth
        if not self.in_background:
            save += size / hardware.disk
        validation = None
        if self.val_samples is not None:
            micro_batches = math.ceil(self.val_samples / (batch.global_size / batch.accumulation))
            validation = micro_batches * (1 - BACKWARD_SHARE) * time.compute / batch.accumulation
        saves = saves_after(0, self.save_every, self.val_every, last, keeps_best=self.keeps_best)
        return Pauses(validations_after(0, self.val_every, last), validation, saves, save)


@dataclass(frozen=True)
class Pauses:
    """How often a run validates and saves, and how many seconds each takes."""

    validations: int
    validation: float | None  # None: its size is unknown
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
    lr: float | None  # peak, scaled
    memory: Memory
    fits: bool
    largest_micro_size: int
    remedies: list[Remedy]  # if it does not fit
    time: StepTime
    samples_per_second: float
    efficiency: float  # samples per second per device, as a fraction of a single device's
    seconds: float | None  # of the steps until `samples` are reached
    pauses: Pauses | None  # between them
    cost: float | None


@dataclass(frozen=True)
class Plan:
    """Predictions for all numbers of devices, and the assumptions behind them."""

    hardware: Hardware
    precision: str
    parameters: int
    flops: int  # of a sample, in forward and backward
    kernels: int  # of a micro-batch
    gradient_bytes: int
    buckets: int  # of the all-reduce; 0: states are sharded, so gradients are scattered
    samples: float | None  # of the run
    scaling: str
    rows: list[Row]
    refused: dict[int, str]  # number of devices -> why a run cannot use it
    notes: list[str]
    tokens: Tokens | None = None


def predict(
    training: Training,
    hardware: Hardware | str = "h100",
    devices: Sequence[int] = (1, 2, 4, 8),
    *,
    samples: float | None = None,
    scaling: str | None = None,
    price: float | None = None,
    rate: Rate | None = None,
    rhythm: Rhythm | None = None,
    tokens: Tokens | None = None,
    others: Mapping[str, Training] | None = None,
) -> Plan:
    """Predict memory, time, and cost of a run on each number of devices.

        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(1000, 4000), nn.ReLU(), nn.Linear(4000, 10))
        >>> example = torch.empty(1, 1000), torch.empty(1, dtype=torch.int64)
        >>> loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
        >>> batch = lockstep.Batch(global_size=4096)
        >>> plan = predict(Training(model, example, batch, loss), "a100-80", devices=(1, 8))
        >>> [row.batch.micro_size for row in plan.rows]
        [4096, 512]
        >>> all(row.fits for row in plan.rows)
        True

    Args:
        training: what is trained; its own devices, if it has any, are ignored.
        hardware: the devices and their links; or a name, such as a100-80.
        devices: numbers of devices.
        samples: of the run, which time and cost are for; None: only steps are planned.
        scaling: strong or weak; None: strong if the batch has a `global_size`.
        price: of a device for an hour.
        rate: to show how the learning rate grows with the batch.
        rhythm: to count validations and saves.
        tokens: of a language model.
        others: what may fit if this doesn't, see `Room`; None: shards, if they work.

    Raises:
        UserError: the device's speed in this precision is unknown, or the step can't be counted.
    """
    device = find_hardware(hardware) if isinstance(hardware, str) else hardware
    device.flops(training.precision)  # fails early
    if others is None:
        others = {SHARDING: sharded(training)} if can_shard(training) else {}
    room = Room(training, device, others)
    planner = _Planner(room, _work(room), samples, price, rate, rhythm)
    return replace(planner.plan(devices, scaling), tokens=tokens)


def can_shard(training: Training) -> bool:
    """Return whether FSDP2 could shard what every rank now has."""
    fits = training.precision in SHARDED and not training.batch.is_exact
    return fits and training.strategy != "fsdp2"


def sharded(training: Training) -> Training:
    """Return the same with FSDP2 and its defaults."""
    return replace(training, strategy="fsdp2", settings={})


def _work(room: Room) -> Work:
    training = room.training
    settings = training.settings
    sums = 0
    if training.tensor_parallel > 1:
        # Each block adds twice in forward and twice in backward, the embedding in forward, and the
        # head in backward.
        sums = (4 * len(training.units) + 2) * room.alone.stream
    return Work(
        kernels=room.alone.kernels,
        flops=training.flops,
        bytes_read=sample_bytes(training.example),
        gradients=training.gradients,
        states=training.states,
        precision=training.precision,
        bucket_cap_mb=settings.get("bucket_cap_mb", 25),
        compression=COMPRESSION.get(settings.get("comm_hook", "none"), 1.0),
        clips=training.clips,
        muon_flops=sum(flops_of(tuple(each.shape)) for each in training.matrices),
        sharing=room.sharing,
        ownership=room.ownership,
        tensor_sums=sums,
    )


def _notes(room: Room) -> list[str]:
    """Return notes on what the prediction leaves out, and on a faster precision."""
    training = room.training
    hardware = room.hardware
    notes = []
    if training.settings.get("comm_hook") == "powersgd":
        notes.append("strategy.comm_hook=powersgd is planned without its compression")
    if training.tensor_parallel > 1:
        notes.append(
            f"strategy.tensor_parallel={training.tensor_parallel}: all of its sums are exposed, "
            "and memory is planned as if each rank computed whole layers"
        )
    if training.compiled:
        notes.append("compile=true keeps fewer activations than planned (for eager mode)")
    if training.precision == "32-true" and "bf16" in hardware.peak:
        gain = hardware.peak["bf16"] / hardware.flops("32-true")
        notes.append(f"precision=bf16-mixed has {gain:.1f} times the peak of 32-true here")
    return notes


def _rate_note(rate: Rate | None, rows: Sequence[Row]) -> list[str]:
    """Note if linear scaling leaves the range in which it was found."""
    if rate is None or rate.scaling != "linear":
        return []
    growth = max((row.lr / rate.peak for row in rows if row.lr), default=1.0)
    if growth <= LINEAR_RANGE:
        return []
    return [
        f"lr_scaling=linear multiplies the rate by up to {growth:,.0f}; it was shown to work "
        f"up to {LINEAR_RANGE} (Goyal et al. 2017, figure 1): use sqrt, or fix batch.global_size"
    ]


@dataclass(frozen=True)
class _Planner:
    room: Room
    work: Work
    samples: float | None
    price: float | None
    rate: Rate | None
    rhythm: Rhythm | None

    def plan(self, world_sizes: Sequence[int], scaling: str | None) -> Plan:
        """Predict each number of devices."""
        training = self.room.training
        work = self.work
        kind, batch = self.scaled(world_sizes, scaling)
        rows, refused = self.rows(world_sizes, batch)
        return Plan(
            hardware=self.room.hardware,
            precision=training.precision,
            parameters=training.parameters,
            flops=work.flops,
            kernels=work.kernels,
            gradient_bytes=work.states.gradients,
            buckets=0 if work.sharing else len(buckets(work.gradients, work.bucket_cap_mb)),
            samples=self.samples,
            scaling=kind,
            rows=rows,
            refused=refused,
            notes=[*_notes(self.room), *_rate_note(self.rate, rows)],
        )

    def scaled(self, world_sizes: Sequence[int], scaling: str | None) -> tuple[str, Batch]:
        """Return the kind of scaling, and the batch, which grows only if that is asked for."""
        batch = self.room.training.batch
        if batch.grows:
            return "weak", batch
        if scaling != "weak" or batch.is_exact:
            return "strong", batch
        several = [world_size for world_size in sorted(world_sizes) if world_size > 1]
        fitting = filter(None, map(self.room.largest_micro_size, several or [1]))
        one = batch.spread_over(1)
        size = one.micro_size
        if one.accumulation == 1:  # no micro-batch was chosen
            size = min(batch.global_size, next(fitting, 1))
        return "weak", Batch(micro_size=size, reference_size=batch.reference_size)

    def _spread(self, world_size: int, batch: Batch) -> Batch:
        devices = min(world_size, self.room.hardware.devices_per_node)
        if world_size % devices:
            raise UserError(
                f"{world_size} devices are not a whole number of nodes of {devices} each; set "
                "--per-node"
            )
        nodes = world_size // devices
        return batch.spread_over(devices, nodes, self.room.training.tensor_parallel)

    def rows(self, world_sizes: Sequence[int], batch: Batch) -> tuple[list[Row], dict[int, str]]:
        """Predict each number of devices that a run can use; return the errors of all others."""
        one = batch.spread_over(1)
        base = one.global_size / step_time(self.work, one, self.room.hardware).total
        rows: list[Row] = []
        refused: dict[int, str] = {}
        for world_size in world_sizes:
            try:
                spread = self._spread(world_size, batch)
                rows.append(self._row(spread, base))
            except UserError as error:
                refused[world_size] = str(error)
        return rows, refused

    def _row(self, batch: Batch, base: float) -> Row:
        hardware = self.room.hardware
        memory = self.room.memory(batch.micro_size, batch.world_size)
        fits = memory.total <= hardware.memory
        time = step_time(self.work, batch, hardware)
        speed = batch.global_size / time.total
        seconds = pauses = cost = None
        if self.samples is not None:
            seconds = self.samples / speed
            steps = self.samples / batch.global_size
            if self.rhythm is not None:
                pauses = self.rhythm.pauses(batch, time, self.work.states, hardware, steps)
            if self.price is not None:
                cost = seconds / 3600 * batch.world_size * self.price
        rate = self.rate
        return Row(
            batch=batch,
            lr=None if rate is None else scaled_lr(rate.peak, batch, rate.scaling),
            memory=memory,
            fits=fits,
            largest_micro_size=self.room.largest_micro_size(batch.world_size),
            remedies=[] if fits else self.room.remedies(batch),
            time=time,
            samples_per_second=speed,
            efficiency=speed / (batch.world_size * base),
            seconds=seconds,
            pauses=pauses,
            cost=cost,
        )
