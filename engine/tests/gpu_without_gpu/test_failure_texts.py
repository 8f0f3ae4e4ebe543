"""Failure messages of NCCL, CUDA, and torch, as users reported them: is a rank lost or not?"""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lockstep.ranks.ranks import lost_peers
from lockstep.run.remedies import explain

NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, "
REMOTE = (
    f"{NCCL}remote process exited or there was a network error, NCCL version 2.21.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.\nLast error:\n"
)
INTERNAL = f"{NCCL}internal error, NCCL version 2.14.3\nncclInternalError: Internal check failed.\n"
SYSTEM = (
    f"{NCCL}unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device "
    "error.\nLast error:\n"
)
USAGE = (
    f"{NCCL}invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.5\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
)
CUDA = (
    f"{NCCL}unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)
# Another rank is gone: the agent restarts all ranks.
LOST = [
    dist.DistBackendError(f"{REMOTE}socketProgressOpt: Call to recv from 10.0.0.2<33759> failed"),
    dist.DistBackendError(f"{REMOTE}NET/OFI Request 0x7f14 completed with error. RC: 113."),
    dist.DistBackendError(f"{INTERNAL}Last error:\nNet : Connection closed by remote peer a<5026>"),
    dist.DistBackendError(f"{SYSTEM}socketProgress: Connection closed by remote peer node2<42830>"),
    dist.DistBackendError("NCCL communicator was aborted on rank 1."),
    dist.DistBackendError(
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE"
        ", NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600013 milliseconds before timing out"
    ),
    dist.DistStoreError("wait timeout after 1800000ms, keys: /default_pg/0//cpu//0/1"),
    dist.DistNetworkError("The client socket has failed to connect to [10.0.0.1]:29500"),
    RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:12905"),
    RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"),
]
OF_MEMORY = [
    f"{CUDA}Cuda failure 2 'out of memory'",
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total",
]
# A restart would end the same way.
OWN = [
    *OF_MEMORY,
    f"{USAGE}Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
    f"{USAGE}ncclCommInitRankConfig: invalid rank 3 of 2",
    f"{CUDA}Cuda failure 999 'unknown error'",
    f"{CUDA}Cuda failure 700 'an illegal memory access was encountered'",
    f"{SYSTEM}Error while creating shared memory segment /dev/shm/nccl-5gN8 (size 9637888)",
    f"{INTERNAL}Last error:\nProxy Call to rank 0 failed (Connect)",
    "ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
    "No backend type associated with device type cpu",
    "CUDA error: device-side assert triggered",
    "CUDA error: an illegal memory access was encountered",
    "Detected mismatch between collectives on ranks. Rank 0 is running",
]


@pytest.mark.parametrize("error", LOST, ids=lambda error: str(error).split("\n")[-1][:30])
def test_a_lost_rank_is_recognized_by_errors_of_the_others(error):
    assert lost_peers(error)


@pytest.mark.parametrize("kind", [RuntimeError, dist.DistBackendError])
@pytest.mark.parametrize("text", OWN, ids=lambda text: text.split("\n")[-1][:30])
def test_errors_of_settings_cuda_or_memory_are_not_lost_ranks(text, kind):
    assert not lost_peers(kind(text))


@pytest.mark.parametrize("text", OF_MEMORY, ids=lambda text: text.split("\n")[-1][:30])
def test_memory_is_reported_with_a_remedy(text):
    assert "\nremedy  lower batch.micro_size, " in explain(text)
