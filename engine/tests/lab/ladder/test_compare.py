"""The ladder's proof: every rung, and the command, has the losses of the plain loop."""

import re
import signal

import pytest

LINE = "python lab/ladder/compare.py trainer=cpu"


@pytest.mark.slow
def test_all_rungs_have_one_curve_on_one_and_two_ranks(shown):
    out = shown(LINE)
    rows = re.findall(r"^(\S.*?\S) +([12])  +\d+ .* (\S+)$", out, flags=re.MULTILINE)
    runs = [(name, int(ranks)) for name, ranks, _ in rows]
    names = ["ddp_by_hand", "ddp_accelerate", "lockstep-gpt"]
    one = [("single_device", 1), *((name, 1) for name in names)]
    assert runs == [*one, *((name, 2) for name in names)] * 2
    differences = [0.0 if cell == "reference" else float(cell) for *_, cell in rows]
    assert max(differences[:7]) <= 1e-10
    assert max(differences[7:]) <= 1e-5
    assert out.endswith("equal: 64-true to 1e-10, 32-true to 1e-05\n")


def test_validation_weighs_samples_and_prints_the_error_of_weighing_batches(shown):
    out = shown(LINE)
    validations = re.findall(r"^\S.* [12]  +\d.* (\d\.\d{6})  +\S+$", out, flags=re.MULTILINE)
    assert len(validations) == 14
    assert len({f"{float(each):.5f}" for each in validations}) == 1
    means = re.search(r"is (\d\.\d+) and (\d\.\d+) on 1 and 2 ranks", out)
    assert means
    assert len({validations[0], means[1], means[2]}) == 3


def test_the_chart_is_a_picture(shown, shared):
    shown(LINE)
    assert (shared / "ladder/runs/ladder.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("rung", ["single_device", "ddp_by_hand", "ddp_accelerate"])
@pytest.mark.usefixtures("modules")
def test_a_rung_is_short_enough_to_be_read_in_five_minutes(rung, ladder):
    from compare import code_lines

    assert code_lines(ladder / f"{rung}.py") < 120


@pytest.mark.usefixtures("modules")
def test_a_loss_beyond_its_bar_is_named(tmp_path, capsys):
    from compare import Run, judge

    for name, loss in (("one", 1.0), ("two", 1.0 + 2e-5)):
        (tmp_path / name).write_text(f"train/loss\n{loss}\n")
    runs = [Run(name, ranks, tmp_path / name, 0.0) for ranks, name in ((1, "one"), (2, "two"))]
    assert judge({"32-true": runs}) == 1
    assert capsys.readouterr().out == "two on 2 ranks, 32-true: 2.0e-05 is above 1e-05\n"
    assert judge({"32-true": runs[:1]}) == 0


@pytest.mark.parametrize("flag", ["--ranks=2", "--ranks=1,x", "--precisions=16-true"])
@pytest.mark.usefixtures("modules")
def test_a_wrong_flag_fails_in_one_line(flag, monkeypatch, capsys):
    import compare

    monkeypatch.setattr("sys.argv", ["compare.py", flag])
    with pytest.raises(SystemExit, match="2"):
        compare.main(compare.compare)
    error = capsys.readouterr().err
    assert error.startswith(f"compare.py: {flag.replace('=', ' ')} ")
    assert error.count("\n") == 1


@pytest.mark.slow
def test_rows_are_printed_as_runs_end_and_a_signal_leaves_no_processes(
    start, tmp_path, processes_of
):
    process = start(f"TMPDIR={tmp_path} {LINE}", tmp_path)
    told = [process.stdout.readline() for _ in range(3)]  # before other rungs have run
    assert [line.split()[0] for line in told] == ["precision=64-true", "rung", "single_device"]
    process.terminate()
    process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM
    assert not [*tmp_path.glob("tmp*")]
    assert not processes_of(tmp_path)
