"""What a rank sets before it meets the others: NCCL's recorder, and an address that stays local."""

from __future__ import annotations

import os
import socket
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lockstep_gpt.config import Config
from lockstep_gpt.extras.guards.watching import record_collectives

AGENT_HAS_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # then rank 0 connects like the others
_stores: list[TCPStore] = []  # they listen for as long as they exist


def prepare(config: Config) -> None:
    """Record NCCL's collectives, and meet where no other machine can connect."""
    record_collectives(config)
    stay_local()


def stay_local() -> None:
    """Listen at an address that no other machine reaches; torch's default listens on all.

    Nothing changes if the ranks are on several nodes, or if a launcher already uses the port.
    """
    has_store = os.environ.get(AGENT_HAS_STORE) == "True"
    if has_store or os.environ.get("MASTER_ADDR") not in ("127.0.0.1", "localhost"):
        return
    if os.environ["RANK"] == "0":
        address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
        descriptor = socket.create_server(address).detach()  # torch owns it from now on
        there: Any = {"is_master": True, "wait_for_workers": False, "master_listen_fd": descriptor}
        _stores.append(TCPStore(*address, **there))
    os.environ[AGENT_HAS_STORE] = "True"
    os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")  # torch then reads it
