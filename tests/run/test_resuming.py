"""Ranks that resume read one run directory."""

from lockstep_gpt.errors import UserError
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.resuming import refuse_other_directory


def test_a_folder_that_only_looks_shared_is_named(on_ranks, tmp_path):
    runs = [RunDirectory(tmp_path / f"machine{number}") for number in range(2)]
    for number, run in enumerate(runs):  # before any rank reads them
        run.path.mkdir()
        run.config.write_text(f"seed: {number}\n")

    def compare(rank):
        run = runs[rank // 2]
        try:
            return refuse_other_directory(run)
        except UserError as error:
            return str(error)

    assert on_ranks(2, compare) == [None, None]
    rule = "of rank 2, 3 is not rank 0's folder; name one that all nodes share"
    first, *_, last = on_ranks(4, compare)
    assert (first, last) == tuple(f"run_dir={tmp_path}/machine{n} {rule}" for n in (0, 1))
