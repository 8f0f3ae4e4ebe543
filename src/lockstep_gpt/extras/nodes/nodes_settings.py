"""Settings that this extra adds to `launch`."""

from dataclasses import dataclass

from lockstep_gpt.config import LaunchConfig, setting


@dataclass
class NodesLaunch(LaunchConfig):
    """Several machines without a launcher."""

    node_rank: int = setting(
        "number of this machine, from 0 to trainer.num_nodes - 1", 0, at_least=0
    )
    rdzv_endpoint: str | None = setting("HOST:PORT of machine 0, where all machines meet", None)
    min_nodes: int | None = setting(
        "continue with at least this many machines; null: trainer.num_nodes", None, at_least=1
    )
    join_seconds: float = setting("longest wait for the other machines", 300.0, above=0)
    lost_seconds: float = setting("silence after which a machine counts as lost", 15.0, above=0)
