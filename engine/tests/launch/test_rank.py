"""What a rank passes to the function of a program."""

import pytest

from lockstep.launch.rank import frozen_config
from lockstep.ranks.ranks import Ranks
from lockstep.run.directory import RunDirectory


@pytest.mark.parametrize("frozen", [{}, {"num_nodes": 1}, {"num_nodes": 3}])
def test_the_trainer_has_the_machines_that_there_are(tmp_path, frozen):
    run = RunDirectory(tmp_path / "run")
    run.create({"trainer": {"devices": 1, **frozen}})
    of_two = Ranks(rank=1, local_rank=0, world_size=2, local_world_size=1)
    assert frozen_config(run, of_two).trainer.num_nodes == 2
    assert frozen_config(run, Ranks()).trainer.get("num_nodes", 1) == 1


def test_a_program_without_a_trainer_gets_its_configuration_unchanged(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create({"seed": 1})
    two = Ranks(rank=1, local_rank=0, world_size=2, local_world_size=1)
    assert frozen_config(run, two) == {"seed": 1}
