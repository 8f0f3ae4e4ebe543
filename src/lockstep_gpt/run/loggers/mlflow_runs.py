"""`logger=mlflow`: one MLflow run per run directory, even after a resume."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.pytorch.loggers import MLFlowLogger

from lockstep_gpt.config import UserError
from lockstep_gpt.run.directory import RunDirectory


class MLflowRun(MLFlowLogger):
    """Lightning's logger, for a run that may resume with other settings than at its start."""

    def log_hyperparams(self, params: Any) -> None:
        """Log only new parameters: MLflow rejects another value for a known one."""
        known: Mapping[str, str] = self.experiment.get_run(self.run_id).data.params
        found = _flatten_dict(_convert_params(params))
        super().log_hyperparams({name: found[name] for name in found if name not in known})


def mlflow_logger(
    *,
    directory: RunDirectory,
    config: dict[str, Any],
    experiment: str,
    tracking_uri: str | None,
    tags: dict[str, str],
) -> MLflowRun:
    """Resume the MLflow run whose id is in `directory`, or start one, named by `config`."""
    try:
        from mlflow.exceptions import MlflowException
    except ImportError:
        remedy = 'pip install "lockstep-gpt[mlflow]"'
        raise UserError(f"logger=mlflow needs MLflow; {remedy}") from None
    here = f"sqlite:///{Path('mlflow.db').absolute()}"
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or here
    file = directory.path / "mlflow_run_id"
    run_id = file.read_text(encoding="utf-8") if file.exists() else None
    try:
        run = MLflowRun(experiment, config["run_name"], uri, tags=tags, run_id=run_id)
        if run_id:
            run.experiment.update_run(run_id, status="RUNNING")
        file.write_text(str(run.run_id), encoding="utf-8")
    except MlflowException as error:
        reason = str(error).partition(". ")[0]
        rule = f"is rejected by MLflow: {reason}"
        raise UserError(f"logger.mlflow.tracking_uri={uri} {rule}") from None
    return run
