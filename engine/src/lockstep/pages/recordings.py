"""The files of recorded steps: `RUN/sync/step=000050.json`, plain JSON that rank 0 writes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.damaged_files import read_informative_object
from lockstep.errors import UserError
from lockstep.whole_files import replace_text

if TYPE_CHECKING:  # commands that read recordings don't need torch
    from lockstep.pages.recording import Numbers, Probe, Step

FOLDER = "sync"


def recording_path(run: Path, step: int) -> Path:
    """Return the path of the recording of optimizer step `step`."""
    return run / FOLDER / f"step={step:06d}.json"


def write_recording(run: Path, content: dict[str, Any]) -> None:
    """Write one step; a reader never sees a partial file."""
    path = recording_path(run, content["step"])
    path.parent.mkdir(exist_ok=True)
    replace_text(path, as_json(content))


def read_recordings(run: Path) -> list[dict[str, Any]]:
    """Return all recorded steps of a run, in order.

    Raises:
        UserError: there is no such run, or none of its steps was recorded.
    """
    if not run.is_dir():
        raise UserError(f"{run} is not a run directory; name one that a training run wrote")
    contents = map(read_informative_object, (run / FOLDER).glob("step=*.json"))
    recordings = [content for content in contents if isinstance(content.get("step"), int)]
    if not recordings:
        raise UserError(
            f"{run} contains no recorded steps; record some with callbacks=[default,sync_panel]"
        )
    return sorted(recordings, key=lambda recording: int(recording["step"]))


def as_json(content: Any) -> str:
    """Return JSON that every reader accepts: numbers that aren't finite become null."""
    return json.dumps(_finite(content), allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def describe(step: Step, probe: Probe, samples: list[list[str]], ranks: int) -> dict[str, Any]:
    """Return one recorded step as plain values.

    Args:
        step: the numbers of the step.
        probe: names and positions of the values that were read.
        samples: the text of each rank's samples.
        ranks: how many ranks to keep values for.
    """
    # One piece per parameter.
    before = probe.split(_short(step.before[:ranks], probe))
    after = probe.split(_short(step.after[0], probe))
    weights = probe.split(_short(step.weights[0], probe))
    updated = probe.split(_short(step.updated[0], probe))
    norms = _short(step.norms[:ranks], probe)
    mean_norms = _short(step.mean_norms[0], probe)
    parameters = [
        {
            "name": name,
            "shape": list(probe.parameters[index].shape),
            "positions": probe.positions[index],
            "before": before[index].tolist(),  # by rank
            "after": after[index].tolist(),
            "weights": weights[index].tolist(),
            "updated": updated[index].tolist(),
            "norms": norms[:, index].tolist(),  # by rank
            "mean_norm": float(mean_norms[index]),
        }
        for index, name in enumerate(probe.names)
    ]
    return {
        "ranks": step.ranks,
        "micro_size": step.micro_size,
        "accumulation": step.accumulation,
        "spread": step.spread,
        "losses": step.losses[:ranks].tolist(),
        "samples": samples,
        "parameters": parameters,
    }


def _short(values: Numbers, probe: Probe) -> Numbers:
    """Return float64 values that print with a float32's digits, unless the model has float64.

    That is nine digits instead of seventeen, and they read back as the same float32.
    """
    if probe.exact:
        return values
    return values.astype("float32").astype(str).astype("float64")
