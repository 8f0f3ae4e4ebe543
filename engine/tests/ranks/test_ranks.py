import pytest
import torch.distributed as dist

from lockstep.ranks.ranks import (
    Ranks,
    backend_of,
    from_each_rank,
    from_rank_zero,
    join,
    lost_peers,
)

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@pytest.fixture
def launched(monkeypatch):
    def by(**sizes):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in sizes.items():
            monkeypatch.setenv(name, str(value))
        return Ranks.from_environment()

    return by


def test_without_a_launcher_a_rank_is_alone(launched):
    assert launched() == Ranks(0, 0, 1, 1)


def test_ranks_come_from_the_launcher_s_variables(launched):
    ranks = launched(RANK=5, LOCAL_RANK=1, WORLD_SIZE=8, LOCAL_WORLD_SIZE=4)
    assert ranks == Ranks(5, 1, 8, 4)
    assert ranks.num_nodes == 2


def test_a_launcher_that_counts_no_local_ranks_has_one_machine(launched):
    assert launched(RANK=1, LOCAL_RANK=1, WORLD_SIZE=3).num_nodes == 1


@pytest.mark.parametrize(
    ("accelerator", "backend", "expected"),
    [
        ("cpu", None, "gloo"),
        ("cuda", None, "nccl"),
        ("cuda", "gloo", "gloo"),
        ("cpu", "mpi", "mpi"),
    ],
)
def test_the_backend_is_the_one_asked_for_or_the_accelerator_s(accelerator, backend, expected):
    assert backend_of(accelerator, backend) == expected


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer [::1]:1"), True),
        (RuntimeError("Connection reset by peer"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (dist.DistNetworkError("The client socket has timed out"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_an_error_caused_by_another_rank_s_end_is_recognized(error, lost):
    assert lost_peers(error) is lost


def test_one_rank_agrees_with_itself():
    join(Ranks())
    assert not dist.is_initialized()
    assert from_rank_zero("größer") == "größer"
    assert from_each_rank("größer") == ["größer"]


def test_texts_reach_every_rank_whole(on_ranks):
    texts = ["größer", "", "日本"]
    assert on_ranks(3, lambda rank: from_rank_zero(texts[rank])) == ["größer"] * 3
    assert on_ranks(3, lambda rank: from_each_rank(texts[rank])) == [texts] * 3
