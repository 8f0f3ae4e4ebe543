"""The elastic agent whose ranks are forks of a server instead of new programs."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing import SubprocessContext

from lockstep_gpt import stop_signals
from lockstep_gpt.extras.warm.server import Child, Server, ServerGoneError
from lockstep_gpt.launch import agent, rank_program
from lockstep_gpt.launch.agent import RankAgent
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.torch_patches import logs_specs_of


def main(path: str, node_rank: int) -> int:
    """Run as the agent of the run at `path`, in a fork of a server; return the exit status."""
    server = Server.forked(path)  # must come first, while there is one thread
    try:
        return agent.main(RunDirectory(Path(path)), node_rank, partial(WarmAgent, server))
    finally:
        server.close()


class WarmAgent(RankAgent):
    """Starts ranks through its server; once that is gone, starts them as every agent does."""

    def __init__(self, server: Server, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._server: Server | None = server

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._server:
            spec = worker_group.spec
            environments = self._environments(worker_group)
            arguments = dict.fromkeys(environments, spec.args)
            ranks = ForkedRanks(
                self._server,
                spec.role,
                spec.entrypoint,
                arguments,
                environments,
                logs_specs_of(self),
            )
            try:
                ranks.start()
            except ServerGoneError:
                self._server = None
            else:
                self._pcontext = ranks
                return ranks.pids()
        return cast(dict[int, Any], super()._start_workers(worker_group))

    def _environments(self, group: WorkerGroup) -> dict[int, dict[str, str]]:
        """Return local rank -> the environment variables that torch's agent sets for a rank."""
        spec = group.spec
        same = dict(os.environ)  # for all ranks
        same |= {
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "ROLE_NAME": spec.role,
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RESTART_COUNT": str(spec.max_restarts - self._remaining_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
        }
        same.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        return {
            worker.local_rank: {
                **same,
                "LOCAL_RANK": str(worker.local_rank),
                "RANK": str(worker.global_rank),
                "ROLE_RANK": str(worker.role_rank),
                "ROLE_WORLD_SIZE": str(worker.role_world_size),
                "WORLD_SIZE": str(worker.world_size),
            }
            for worker in group.workers
        }


class ForkedRanks(SubprocessContext):
    """The ranks of one start, which torch's agent watches as it watches programs."""

    def __init__(self, server: Server, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._server = server

    def _start(self) -> None:
        """Fork all ranks at once."""
        _, *words = self.args[0]  # without `-m`
        _, path, _ = words
        environments = [self.envs[rank] for rank in range(self.nprocs)]
        children = self._server.fork(f"{__name__}:rank", [path], words, environments)
        handlers: dict[int, Any] = {
            rank: Handler(child, rank) for rank, child in enumerate(children)
        }
        self.subprocess_handlers = handlers


class Handler:
    """A rank's process as torch's agent needs it; torch's `SubprocessHandler` starts a program."""

    def __init__(self, proc: Child, local_rank_id: int) -> None:
        self.proc = proc
        self.local_rank_id = local_rank_id

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal to the process and all processes that it has started."""
        os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


def rank(path: str) -> int:
    """Run as a rank of the run at `path`, in a fork of a server; return its exit status."""
    stop_signals.end_at_once()  # until there is something to save
    return rank_program.run_rank(RunDirectory(Path(path)))
