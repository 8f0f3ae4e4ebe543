"""Each rank's shards in memory, on machines that have folders of their own for it."""

import pytest
import torch

from lockstep.memory import files
from lockstep.memory.files import (
    Identity,
    SharedMemoryError,
    make_folder,
    states_in,
)
from lockstep.memory.shard_recovery import (
    find_shards,
    newest_shards,
    remove_other_shards,
)
from lockstep.memory.shards import (
    NO_LABEL,
    RankShards,
    ShardCopies,
    name_of,
    part_of_rank,
)
from lockstep.memory.slots import Layout, SlotPair
from lockstep.memory.states import read_state
from lockstep.ranks.machine_ring import MachineRing
from lockstep.ranks.ranks import Ranks

IDENTITY = Identity("0123456789abcdef", "/runs/first", "boot")


def state_of(rank, step):
    return {"numbers": torch.arange(500.0 + 100 * rank) * (rank + 1) + step, "step": step}


class Machine:
    """What one of four ranks has: two machines with two ranks each."""

    def __init__(self, folder, rank, boot="boot"):
        self.ranks = Ranks(rank, rank % 2, 4, 2)
        self.memory = folder / f"machine {rank // 2}"
        self.memory.mkdir(exist_ok=True)
        files.SHARED_MEMORY = self.memory  # in this rank's process
        self.identity = Identity(IDENTITY.token, IDENTITY.run, f"{boot} {rank // 2}")
        self.ring = MachineRing(self.ranks, 60)

    def keep(self, *steps, era=1, copies=True):
        own = SlotPair(make_folder(self.identity), name_of(self.ranks.rank))
        others = ShardCopies(self.ring, self.identity, None)
        for step in steps:
            slot = own.next_slot()
            layout = Layout(state_of(self.ranks.rank, step))
            slot.fill(layout)
            slot.seal(layout, self.identity, step, part_of_rank(self.ranks, era))
            if copies:
                (kept,) = (kept for kept in states_in(self.identity) if kept.path == slot.path)
                others.update(kept.header.pack(), slot.content[: kept.header.size])

    def found(self):
        shards = RankShards(self.ranks, self.ring)
        kept = newest_shards(self.identity, self.ranks, shards, at_least=0)
        if kept is None:
            return None
        state = read_state(kept)
        step = state["step"]
        assert torch.equal(state["numbers"], state_of(self.ranks.rank, step)["numbers"])
        assert kept.header.identity == self.identity
        return step

    def lose_first(self):
        """Lose the memory of the first machine; every rank must call this."""
        torch.distributed.barrier()
        if self.ranks.rank in (0, 1):
            files.remove_states(self.identity)
        torch.distributed.barrier()

    def files(self):
        return {path.name: path for path in self.identity.folder.iterdir()}


@pytest.fixture
def on_machines(on_ranks, tmp_path):
    """Run a function with each of four ranks' `Machine`."""
    return lambda function: on_ranks(4, lambda rank: function(Machine(tmp_path, rank)))


def test_ranks_find_their_shards_in_their_own_machine(on_machines):
    def keep_and_find(machine):
        machine.keep(4, 6, 8)
        torch.distributed.barrier()
        names = sorted(machine.files())
        torch.distributed.barrier()
        return machine.found(), names

    for rank, (step, names) in enumerate(on_machines(keep_and_find)):
        assert step == 8
        first = rank // 2 * 2
        holds = [f"rank {first}", f"rank {first + 1}"]
        copies = [f"copy of {(first + 2) % 4}", f"copy of {(first + 3) % 4}"]
        assert names == [f"{name}.{number}" for name in sorted(holds + copies) for number in (0, 1)]


def test_a_replaced_machine_gets_its_shards_from_the_next_one(on_machines):
    def lose_and_find(machine):
        machine.keep(4, 6)
        machine.lose_first()
        step = machine.found()
        return step, machine.found()  # now everything is where it belongs

    assert on_machines(lose_and_find) == [(6, 6)] * 4


def test_damaged_shards_are_replaced_by_their_copy(on_machines):
    def damage_and_find(machine):
        machine.keep(4, 6)
        if machine.ranks.rank == 3:
            (newest,) = (
                kept
                for kept in states_in(machine.identity)
                if kept.step == 6 and kept.path.name.startswith("rank 3")
            )
            damage(newest.path)
        return machine.found(), machine.found()

    assert on_machines(damage_and_find) == [(6, 6)] * 4


def test_if_the_copy_is_damaged_too_the_state_before_serves(on_machines):
    def damage_and_find(machine):
        machine.keep(4, 6)
        torch.distributed.barrier()
        states = states_in(machine.identity) if machine.ranks.local_rank == 0 else []
        for kept in states:
            if kept.step == 6 and kept.path.name[:-2] in ("rank 3", "copy of 3"):
                damage(kept.path)
        torch.distributed.barrier()
        return machine.found()

    assert on_machines(damage_and_find) == [4] * 4


def damage(path):
    with path.open("r+b") as file:
        file.seek(files.HEADER_BYTES + 100)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def test_without_a_rank_s_shards_no_state_is_found_and_one_line_says_so(on_machines, caplog):
    def lose_and_find(machine):
        machine.keep(4, 6, copies=False)
        torch.distributed.barrier()
        if machine.ranks.rank == 2:
            for name in ("rank 2.0", "rank 2.1"):
                machine.files()[name].unlink()
        torch.distributed.barrier()
        caplog.clear()
        step = machine.found()
        return step, [record.getMessage() for record in caplog.records]

    line = "no state is read from memory: of step 6, no machine has the shards of rank 2"
    assert on_machines(lose_and_find) == [(None, [line]), *[(None, [])] * 3]


def test_a_machine_without_room_for_its_shards_lets_all_use_the_disk(
    on_machines, caplog, monkeypatch
):
    def lose_and_find(machine):
        machine.keep(4, 6)
        machine.lose_first()
        caplog.clear()
        if machine.ranks.rank == 1:
            monkeypatch.setattr("os.posix_fallocate", refuse)
        step = machine.found()
        return step, [record.getMessage() for record in caplog.records]

    results = on_machines(lose_and_find)
    assert [step for step, _ in results] == [None] * 4
    (line,) = results[0][1]
    assert "no state is read from memory: " in line
    assert "machine 0 has no room for " in line


def refuse(*_):
    raise OSError(28, "No space left on device")


def test_a_full_memory_is_the_fault_of_one_machine_and_known_to_its_neighbor(
    on_machines, monkeypatch
):
    def fill_and_keep(machine):
        machine.keep(4)
        if machine.ranks.rank == 0:
            monkeypatch.setattr("os.posix_fallocate", refuse)
        others = ShardCopies(machine.ring, machine.identity, None)
        (own,) = (
            kept
            for kept in states_in(machine.identity)
            if kept.path.name == f"rank {machine.ranks.rank}.0"
        )
        content = torch.zeros(own.header.size, dtype=torch.uint8)
        try:
            others.update(own.header.pack(), content)
        except SharedMemoryError as fault:
            return str(fault)
        return "kept"

    first, *results = on_machines(fill_and_keep)
    assert "machine 0 has no room for " in first
    assert results == ["kept", "rank 0 has no room for a copy", "kept"]


def test_a_rank_without_shards_says_so_to_the_next_machine(on_machines):
    def keep_or_skip(machine):
        if machine.ranks.rank == 0:
            copies = ShardCopies(machine.ring, machine.identity, None)
            copies.update(NO_LABEL, torch.empty(0, dtype=torch.uint8))
        else:
            machine.keep(4)
        torch.distributed.barrier()
        return sorted(state.path.name for state in states_in(machine.identity))

    first = ["copy of 2.0", "copy of 3.0", "rank 1.0"]
    second = ["copy of 1.0", "rank 2.0", "rank 3.0"]
    assert on_machines(keep_or_skip) == [first, first, second, second]


def test_what_the_run_has_left_behind_is_removed(on_machines):
    def keep_and_remove(machine):
        machine.keep(4, 6)
        torch.distributed.barrier()
        kept = find_shards(machine.identity, machine.ranks, machine.ring)
        remove_other_shards(machine.identity, kept)
        torch.distributed.barrier()
        steps = [state.step for state in states_in(machine.identity)]
        torch.distributed.barrier()
        remove_other_shards(machine.identity, None)
        torch.distributed.barrier()
        return steps, states_in(machine.identity)

    assert on_machines(keep_and_remove) == [([6] * 4, [])] * 4
