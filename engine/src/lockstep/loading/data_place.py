"""Which of a step's samples are a rank's."""

from typing import NamedTuple

from lightning import Trainer


class DataPlace(NamedTuple):
    """A rank's place among those with samples of their own.

    Ranks that split the model have the same samples.
    """

    rank: int
    size: int  # how many ranks, or groups of ranks, have samples of their own


def data_place(trainer: Trainer) -> DataPlace:
    """Return the place of this rank, as the Trainer's strategy tells any sampler."""
    place = trainer.distributed_sampler_kwargs
    if place is None:  # a single device
        return DataPlace(0, 1)
    return DataPlace(place["rank"], place["num_replicas"])
