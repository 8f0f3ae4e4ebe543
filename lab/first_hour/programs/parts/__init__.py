"""The parts of a training step, measured one after another in one process."""
