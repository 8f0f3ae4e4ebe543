"""What this build of torch can do, which only a process that imports it can say."""

import torch

from lockstep_gpt.errors import UserError
from lockstep_gpt.launch.launch_settings import Launch


def refuse_missing(launch: Launch) -> None:
    """Raise a `UserError` if this build of torch finds fewer devices than the run needs."""
    devices = launch.devices
    if launch.placement.accelerator == "cuda" and torch.cuda.device_count() < devices:
        raise UserError(
            f"trainer.devices={devices} but torch {torch.__version__} finds "
            f"{torch.cuda.device_count()} CUDA devices; install a build of torch for your "
            "driver, or set trainer=cpu"
        )
