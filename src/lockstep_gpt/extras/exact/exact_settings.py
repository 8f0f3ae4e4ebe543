"""Settings that this extra adds to `batch`, and the settings that conflict with them."""

from dataclasses import dataclass

from lockstep_gpt.config import BatchConfig, Config, as_typed, check, setting

OURS = "lockstep_gpt.training.strategies"
STRATEGIES = (f"{OURS}.auto", f"{OURS}.ddp")
RULE = "adds gradients in rank order; set batch.exact_micro_size=null, or"


@dataclass
class ExactBatch(BatchConfig):
    """Micro-batches of the same size on any number of devices."""

    exact_micro_size: int | None = setting(
        "samples of a micro-batch, for bitwise equal results on any number of devices; null: "
        "equal up to rounding",
        None,
        on_resume="kept",
        at_least=1,
    )

    exact_threads: int = setting(
        "CPU threads per rank with exact_micro_size; other numbers round differently",
        1,
        on_resume="kept",
        at_least=1,
    )

    def __post_init__(self) -> None:
        """Also check that it is the size of all micro-batches, and divides the global size."""
        super().__post_init__()
        exact, total = self.exact_micro_size, self.global_size
        if exact is None:
            return
        if total is None:
            self.refuse("exact_micro_size", "needs a batch.global_size, which is null; set it")
        elif total % exact:
            nearest = next(size for size in range(min(exact, total), 0, -1) if total % size == 0)
            rule = f"must divide batch.global_size={total}; nearest: {nearest}"
            self.refuse("exact_micro_size", rule)
        if self.micro_size not in (None, exact):
            rule = f"and batch.micro_size={self.micro_size} are two sizes; set one to null"
            self.refuse("exact_micro_size", rule)
        self.micro_size = exact


def exact_size(batch: BatchConfig) -> int | None:
    """Return the micro-batch size for equal bits; None if unset or `batch` isn't `ExactBatch`."""
    return batch.exact_micro_size if isinstance(batch, ExactBatch) else None


def refuse_other_sums(config: Config) -> None:
    """Raise a `UserError` for settings that would add gradients in another order."""
    if exact_size(config.batch) is None:
        return
    for name, needed in (("comm_hook", "none"), ("find_unused_parameters", False)):
        value = config.strategy.get(name, needed)
        rule = f"{RULE} strategy.{name}={as_typed(needed)}"
        check(f"strategy.{name}", value, value == needed, rule)
    target = config.strategy.get("_target_", STRATEGIES[0])
    check("strategy._target_", target, target in STRATEGIES, f"{RULE} strategy=ddp")
    synchronized = config.trainer.get("sync_batchnorm", False)
    rule = f"{RULE} trainer.sync_batchnorm=false"
    check("trainer.sync_batchnorm", synchronized, not synchronized, rule)
