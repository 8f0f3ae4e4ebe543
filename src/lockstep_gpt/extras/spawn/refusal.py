"""Check before torch is imported whether `strategy=ddp_spawn` can run."""

from __future__ import annotations

from lockstep_gpt.config import Config, UserError
from lockstep_gpt.launch.devices import is_inside_launcher


def refuse_launcher(config: Config) -> None:
    """Raise a `UserError` if ranks would be spawned although a launcher has started some."""
    if config.strategy.get("start_method") == "spawn" and is_inside_launcher():
        raise UserError(
            "strategy=ddp_spawn starts its own ranks and cannot run inside a launcher; "
            "set strategy=ddp"
        )
