"""Chart of a plan: predicted speed and efficiency over the number of devices."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.cluster.prediction import Plan
from lockstep_gpt.optional import import_optional
from lockstep_gpt.whole_files import write_output


def draw(plan: Plan, path: Path) -> None:
    """Write a PNG that plots tokens per second and efficiency against the number of devices.

    Raises:
        UserError: matplotlib is missing, the plan has no rows, or the file cannot be written.
    """
    matplotlib = import_optional("--chart", "matplotlib.figure", "cluster")
    if not plan.rows:
        raise UserError(f"--chart {path} would be empty; change --devices")
    figure = matplotlib.Figure(figsize=(11, 4.5), layout="constrained")
    speed, efficiency = figure.subplots(1, 2)
    _speed(speed, plan)
    _efficiency(efficiency, plan)
    figure.suptitle(
        f"{plan.parameters / 1e9:.3g} B parameters on {plan.hardware.name}, {plan.precision}, "
        f"{plan.scaling} scaling: predicted"
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_output(path, picture.getvalue())


def _speed(axes: Any, plan: Plan) -> None:
    worlds = [row.batch.world_size for row in plan.rows]
    first = plan.rows[0]
    one = first.tokens_per_second / first.efficiency / worlds[0]
    axes.loglog(worlds, [one * world for world in worlds], "--", color="grey", label="linear")
    axes.loglog(worlds, [row.tokens_per_second for row in plan.rows], "o-", label="predicted")
    axes.set_ylabel("tokens per second")
    axes.legend()
    _over_devices(axes, worlds)


def _efficiency(axes: Any, plan: Plan) -> None:
    worlds = [row.batch.world_size for row in plan.rows]
    axes.semilogx(worlds, [100 * row.efficiency for row in plan.rows], "o-")
    axes.set_ylim(0, 105)
    axes.set_ylabel("efficiency, % of one device")
    _over_devices(axes, worlds)


def _over_devices(axes: Any, worlds: list[int]) -> None:
    axes.set_xlabel("devices")
    axes.set_xticks(worlds, [str(world) for world in worlds], rotation=45)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
