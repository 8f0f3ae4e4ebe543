"""`logger=mlflow`: one MLflow run per run directory, even after a resume."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger

from lockstep_gpt.errors import UserError
from lockstep_gpt.optional import import_optional
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.loggers.tracking import known_id
from lockstep_gpt.whole_files import replace_text

logger = logging.getLogger(__name__)

RUN_ID = r"[0-9a-f]{32}"
UNKNOWN = "RESOURCE_DOES_NOT_EXIST"  # one of MLflow's error codes
MISTAKES = ("INVALID_PARAMETER_VALUE", UNKNOWN, "UNAUTHENTICATED", "PERMISSION_DENIED")


class MLflowRun(MLFlowLogger):
    """Resumes the MLflow run whose id is in the run directory, or starts one.

    Args:
        directory: the run.
        config: its configuration; the MLflow run has the same name.
        experiment: the MLflow experiment that the run is filed under.
        tracking_uri: a server or database; None: `MLFLOW_TRACKING_URI`, or a file in this folder.
        tags: name -> value.

    Raises:
        UserError: MLflow isn't installed, or it rejects `tracking_uri`.
    """

    def __init__(
        self,
        *,
        directory: RunDirectory,
        config: dict[str, Any],
        experiment: str,
        tracking_uri: str | None,
        tags: dict[str, str],
    ) -> None:
        exceptions = import_optional("logger=mlflow", "mlflow.exceptions", "mlflow")
        local_uri = f"sqlite:///{Path('mlflow.db').absolute()}"
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or local_uri
        id_file = directory.path / "mlflow_run_id"
        run_id = known_id(id_file, RUN_ID)
        try:
            if run_id is not None and not restart(run_id, uri):
                logger.warning("%s has no run %s any more; the tracker gets a new run", uri, run_id)
                run_id = None
            super().__init__(experiment, config["run_name"], uri, tags=tags, run_id=run_id)
            if run_id is None:
                replace_text(id_file, str(self.run_id))
        except exceptions.MlflowException as error:
            if error.error_code not in MISTAKES:
                raise
            reason = str(error).partition(". ")[0]
            raise UserError(
                f"logger.mlflow.tracking_uri={uri} is rejected by MLflow: {reason}"
            ) from None

    def log_hyperparams(self, params: Any) -> None:
        """Log only new parameters: MLflow rejects another value for a known one."""
        known: Mapping[str, str] = self.experiment.get_run(self.run_id).data.params
        flat = flat_parameters(params)
        super().log_hyperparams({name: flat[name] for name in flat if name not in known})


def restart(run_id: str, uri: str) -> bool:
    """Mark a run at `uri` as running again; return False if there is no such run."""
    mlflow = import_optional("logger=mlflow", "mlflow", "mlflow")
    try:
        mlflow.MlflowClient(uri).update_run(run_id, status="RUNNING")
    except mlflow.exceptions.MlflowException as error:
        if error.error_code != UNKNOWN:
            raise
        return False
    return True


def flat_parameters(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested values under names such as `optim/lr`, as text, like MLflow's."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flat_parameters(value, f"{prefix}{name}/")
        else:
            flat[f"{prefix}{name}"] = str(value)
    return flat
