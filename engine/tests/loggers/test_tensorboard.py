import csv

import pytest


@pytest.mark.slow
def test_tensorboard_has_every_row_of_a_resumed_run_in_one_folder(command):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command.train("logger=tensorboard", "run_dir=run")
    command("train", "run_dir=run", "resume=auto", "max_steps=30", "launch.inline=true")
    folder = command.folder / "run/tensorboard"
    assert len([*folder.glob("events.*")]) == 2
    assert not [path for path in folder.iterdir() if path.is_dir()]
    events = EventAccumulator(str(folder)).Reload()
    with (command.folder / "run/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[-1]["trainer/step"] == "30"
    for name in set(rows[0]) - {"trainer/step"}:
        # Lightning counts steps from 0.
        written = {int(row["trainer/step"]) - 1: float(row[name]) for row in rows if row[name]}
        if written:
            logged = {scalar.step: scalar.value for scalar in events.Scalars(name)}
            assert logged == pytest.approx(written), name  # TensorBoard has 32 bits
