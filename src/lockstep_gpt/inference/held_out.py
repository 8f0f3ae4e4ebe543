"""Runs the validation or test steps of a trained module, on one or more ranks."""

import logging
import warnings
from typing import Any

import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers.logger import DummyLogger

from lockstep_gpt.config import Config
from lockstep_gpt.distributed.cluster_environment import RanksEnvironment
from lockstep_gpt.distributed.ranks import Ranks, from_each_rank
from lockstep_gpt.distributed.strategies import auto
from lockstep_gpt.errors import UserError
from lockstep_gpt.run.callbacks.metrics import Metrics
from lockstep_gpt.run.checkpoint_io import AtomicCheckpointIO
from lockstep_gpt.tokens.datamodule import TokenDataModule
from lockstep_gpt.training import rank_output
from lockstep_gpt.training.building import counted_targets

# Lightning also says that callbacks of training are absent.
NOISE = [*rank_output.NOISE, r".*callbacks used to create the checkpoint.*"]


def measured(
    module: LightningModule,
    data: LightningDataModule,
    config: Config,
    split: str,
    content: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what the validation or test steps of a module log, the same on all ranks.

    Args:
        module: with its weights, or with those that `content` has.
        data: of its run.
        config: of its run.
        split: `val` or `test`.
        content: a checkpoint of the module; None: it has its weights.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    metrics = Metrics()
    targets = CountedTargets() if config.trains_gpt else None
    callbacks = [metrics] if targets is None else [targets, metrics]
    path = None if content is None else "checkpoint"  # which is already read
    with warnings.catch_warnings():
        for pattern in NOISE:
            warnings.filterwarnings("ignore", pattern)
        has_order = isinstance(data, TokenDataModule)
        trainer = trainer_for(config, callbacks, content, has_order=has_order)
        run = trainer.validate if split == "val" else trainer.test
        try:
            run(module, datamodule=data, ckpt_path=path, verbose=False)
        except MisconfigurationException as error:  # such as a split without a loader
            raise UserError(" ".join(str(error).split())) from None
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    result: dict[str, Any] = {**logged, **metrics.row}  # the latter with all their digits
    return result if targets is None else {**result, "tokens": targets.of_all_ranks}


class ReadAlready(AtomicCheckpointIO):
    """Gives the Trainer a checkpoint whose file another process may have replaced by now.

    Args:
        content: of the checkpoint.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__()
        self.content = content

    def load_checkpoint(self, *_arguments: Any, **_options: Any) -> dict[str, Any]:
        """Return the content."""
        return dict(self.content)


class CountedTargets(Callback):
    """Counts the targets of a GPT's micro-batches that aren't padding."""

    def __init__(self) -> None:
        self.of_all_ranks = 0
        self._counts: list[torch.Tensor] = []

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count those of one micro-batch."""
        self._counts.append(counted_targets(batch))

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add all; every rank must call this."""
        own = sum(int(count) for count in self._counts)
        self.of_all_ranks = sum(from_each_rank(own))

    on_test_epoch_end = on_validation_epoch_end


def trainer_for(
    config: Config, callbacks: list[Any], content: dict[str, Any] | None, *, has_order: bool
) -> Trainer:
    """Return a Trainer for this process, which is one rank; it writes nothing.

    It computes in float32, also if training had fewer bits, or in float64 if training did.

    Args:
        config: of the run.
        callbacks: of the Trainer.
        content: the checkpoint that it loads; None: none.
        has_order: whether the data are already split across ranks.
    """
    ranks = Ranks.from_environment()
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    plugins: list[Any] = [ReadAlready(content)] if content is not None else []
    if ranks.world_size > 1:
        plugins.append(RanksEnvironment(ranks))
    # A GPT's checkpoint is loaded into a model in float32.
    is_double = config.precision == "64-true" and not config.trains_gpt
    return Trainer(
        accelerator=accelerator,
        devices=ranks.local_world_size,
        num_nodes=ranks.num_nodes,
        strategy=auto(),
        precision="64-true" if is_double else "32-true",
        callbacks=callbacks,
        plugins=plugins,
        logger=DummyLogger(),  # without one, nothing is logged
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=not has_order,
        inference_mode=False,  # as in training
    )
