"""Settings of how ranks start and end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from lockstep.errors import UserError
from lockstep.settings import Checked, setting


@dataclass
class LaunchSettings(Checked):
    """How the ranks start and end."""

    node: ClassVar[str] = "launch"
    inline: bool = setting("run the only rank in the parent process, for a debugger", False)
    keep_memory: bool = setting(
        "keep freed memory for the next step: faster on CPUs, more memory", True
    )
    max_restarts: int = setting("how many times ranks restart after a kill", 3, at_least=0)
    grace_seconds: float = setting(
        "seconds for ranks to save after a signal, before they are killed", 60.0, above=0
    )
    node_rank: int = setting(
        "number of this machine, from 0 to trainer.num_nodes - 1", 0, at_least=0
    )
    rdzv_endpoint: str | None = setting("HOST:PORT of machine 0, where all machines meet", None)
    min_nodes: int | None = setting(
        "continue with at least this many machines; null: trainer.num_nodes", None, at_least=1
    )
    join_seconds: float = setting(
        "longest wait for other machines, or for a launcher's ranks", 300.0, above=0
    )
    lost_seconds: float = setting("silence after which a machine counts as lost", 15.0, above=0)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the settings in a whole configuration; the defaults if it has none.

        Raises:
            UserError: there is no such setting.
        """
        node = values.get("launch") or {}
        known = [item.name for item in fields(cls)]
        for name in node:
            if name not in known:
                raise UserError(f"launch.{name} is not one of {', '.join(known)}; correct it")
        return cls(**node)
