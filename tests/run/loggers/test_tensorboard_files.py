import csv

import pytest


def test_tensorboard_has_the_same_names(command):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command.train("logger=tensorboard", "run_dir=run")
    events = EventAccumulator(str(command.folder / "run/tensorboard")).Reload()
    with (command.folder / "run/metrics.csv").open() as file:
        rows = [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        ]
    losses = [scalar.value for scalar in events.Scalars("val/loss")]
    assert losses == pytest.approx([row["val/loss"] for row in rows if "val/loss" in row])
    assert set(rows[-1]) - {"trainer/step"} <= set(events.Tags()["scalars"])
