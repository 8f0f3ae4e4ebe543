"""The parts of a training step, one after another in one process: `python -m parts NAME=SECONDS`."""
