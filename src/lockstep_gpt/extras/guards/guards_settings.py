"""Settings that this extra adds to `guard`."""

from dataclasses import dataclass

from lockstep_gpt.config import GuardConfig, setting


@dataclass
class HarmGuard(GuardConfig):
    """Guards against replicas that differ and steps that don't end."""

    replicas_every: int | None = setting(
        "steps between comparisons of the ranks' weights; each save compares too", 500, at_least=1
    )
    stall_after: float | None = setting(
        "seconds without a step until every rank shows its stack and the run ends", 1800.0, above=0
    )
