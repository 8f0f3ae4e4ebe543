"""What this build of torch can do, which only a process that imports it can say."""

import torch

from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError
from lockstep_gpt.settings import check


def refuse_missing(config: Config) -> None:
    """Raise a `UserError` if this build of torch or its driver can't do what is set."""
    devices = config.trainer["devices"]
    if config.trainer["accelerator"] == "cuda" and torch.cuda.device_count() < devices:
        raise UserError(
            f"trainer.devices={devices} but torch {torch.__version__} finds "
            f"{torch.cuda.device_count()} CUDA devices; install a build of torch for your "
            "driver, or set trainer=cpu"
        )
    backend = config.strategy.get("process_group_backend")
    is_available = not backend or torch.distributed.is_backend_available(backend)
    rule = f"is not in torch {torch.__version__}; set nccl for GPUs or gloo"
    check("strategy.process_group_backend", backend, is_available, rule)
