"""Real runs on a mixture: killed and resumed, reported, and continued with other settings."""

import csv
import json
import re
import shutil
from fractions import Fraction

import numpy as np
import pytest
import torch
import yaml

from lockstep.errors import UserError
from lockstep.mixtures.mixed_order import MixedOrder
from lockstep.mixtures.turns import Phase
from lockstep.run.directory import RunDirectory
from lockstep.tokens.sources.text import Text

RANKS = ("trainer=cpu", "strategy=ddp", "strategy.process_group_backend=gloo")
ROW = (
    "trainer/step",
    "train/loss",
    "val/loss",
    "val/loss/code",
    "val/loss/prose",
    "data/tokens/prose",
)


def words(command):
    """Return the settings of a mixture of two small corpora."""
    for name, letters in (("code", "xyz "), ("prose", "klmnop ")):
        text = np.random.default_rng(len(letters)).choice([*letters], 20_000)
        (command.folder / f"{name}.txt").write_text("".join(text))
    sources = [f"+source@data.source.sources.{name}=text" for name in ("code", "prose")]
    paths = [
        f"data.source.sources.{name}.path={command.folder}/{name}.txt" for name in ("code", "prose")
    ]
    weights = ["+data.source.weights.code=0.7", "+data.source.weights.prose=0.3"]
    root = f"data.root={command.folder}/data"
    sizes = ["batch.global_size=6", "batch.micro_size=1", "checkpoint.every=5", "model.n_layer=1"]
    return ["data=mixture", "callbacks=[default,sources]", root, *sources, *paths, *weights, *sizes]


def rows(run):
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def weights_of(run):
    return torch.load(run / "checkpoints/step=000020.ckpt")["state_dict"]


@pytest.fixture(scope="module")
def mixed(finished, tmp_path_factory):
    """A finished run on a mixture, and its command."""
    command = finished[0].elsewhere(tmp_path_factory.mktemp("mixed"))
    schedule = "data.source.schedule=[{from: 0.5, weights: {prose: 1}}]"
    output = command.train(*words(command), schedule, "run_dir=run").stdout
    return command, output


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_killed_run_restarts_to_the_same_bits(world, command, train_and_kill):
    run_words = [*words(command), *RANKS, f"trainer.devices={world}"]
    command.train(*run_words, "run_dir=whole")
    result = train_and_kill(*run_words, "run_dir=hit")
    assert f"rank {world - 1} was killed by SIGKILL; restarting" in result.stderr
    runs = [command.folder / "whole", command.folder / "hit"]
    uninterrupted, killed = map(weights_of, runs)
    assert all(torch.equal(uninterrupted[name], killed[name]) for name in uninterrupted)
    one, other = ([{name: row[name] for name in ROW} for row in rows(run)] for run in runs)
    assert one[2:] == other[2:]


@pytest.mark.slow
def test_metrics_have_each_source_s_loss_and_tokens(mixed):
    table = rows(mixed[0].folder / "run")
    tokens = [(int(row["data/tokens/code"]), int(row["data/tokens/prose"])) for row in table]
    assert [sum(counts) for counts in tokens] == [int(row["trainer/tokens"]) for row in table]
    total = tokens[-1][0] + tokens[-1][1]
    assert tokens[1] == (0.35 * total, 0.15 * total)
    assert tokens[-1] == (0.35 * total, 0.65 * total)
    last = table[-1]
    assert float(last["val/loss"]) == float(last["val/loss/prose"])  # the last phase's only source
    assert float(last["val/loss/code"]) > 0


def test_the_receipt_says_shares_epochs_and_states(mixed):
    command, output = mixed
    places = sorted(path.name for path in (command.folder / "data").glob("text-*"))
    assert re.search(r"  mixture  code 0.7 = 0.069 epochs of text-\w+, prose 0.3 = 0.13 ep", output)
    assert all(place in output for place in places)
    assert "  later  from sample 60: code 0, prose 1" in output


def test_a_run_names_its_sources_and_keeps_one_fingerprint_of_all(mixed):
    folder = mixed[0].folder
    source = yaml.safe_load((folder / "run/config.yaml").read_text())["data"]["source"]
    text = f"{Text.__module__}.{Text.__name__}"
    assert {name: each["_target_"] for name, each in source["sources"].items()} == {
        "code": text,
        "prose": text,
    }
    (place,) = (folder / "data").glob("mixture-*")
    index = json.loads((place / "index.json").read_text())
    kept = RunDirectory(folder / "run").notes()["tokens"]
    assert kept["fingerprint"] == index["fingerprint"]
    assert sorted(index["settings"]["sources"]) == ["code", "prose"]


def test_a_frozen_run_goes_on_after_a_corpus_changed(mixed, command):
    shutil.copytree(mixed[0].folder, command.folder, dirs_exist_ok=True)
    (command.folder / "prose.txt").write_text("other text " * 2000)
    longer = ("max_steps=24", "data.source.planned_tokens=3840", f"data.root={command.folder}/data")
    output = command("train", "run_dir=run", "resume=auto", *longer).stdout
    assert "done in" in output
    assert int(rows(command.folder / "run")[-1]["data/tokens/prose"]) == 2496 + 4 * 6 * 32


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("data.source.weights.code=0.5", "with these weights, epochs, schedule, and max_steps"),
        (
            "data.source.sources.code.val_fraction=0.3",
            "data.source.sources.code.val_fraction=0.3 gives other tokens than",
        ),
        ("max_steps=30", "data.source.planned_tokens=3840 to train longer"),
    ],
)
def test_a_resume_may_not_change_the_past(change, line, mixed, command):
    shutil.copytree(mixed[0].folder, command.folder, dirs_exist_ok=True)
    steps = (
        ()
        if change.startswith("max_steps")
        else ("max_steps=24", "data.source.planned_tokens=3840")
    )
    result = command("train", "run_dir=run", "resume=auto", change, *steps, status=2)
    assert line in result.stderr


@pytest.mark.slow
def test_sources_that_are_repeated_often_or_hardly_used_are_warned_of(command):
    for name in ("tiny", "rare", "late"):
        (command.folder / f"{name}.txt").write_text("abc " * 60)
    names = ("tiny", "rare", "late")
    extra_sources = [f"+source@data.source.sources.{name}=text" for name in names]
    extra_sources += [
        f"data.source.sources.{name}{setting}"
        for name in names
        for setting in (f".path={command.folder}/{name}.txt", ".val_fraction=0.2")
    ]
    shares = ["+data.source.weights.tiny=1", "+data.source.weights.rare=0.0001"]
    shares += ["+data.source.epochs.late=1", "data.source.planned_tokens=10_000"]
    output = command.train(*words(command), *extra_sources, *shares, "run_dir=run").stdout
    assert (
        "the run takes data.source.sources.tiny 12 times; beyond 4 epochs the same tokens teach"
        in output
    )
    assert "the run takes nothing from data.source.sources.rare: its share of 120 windows" in output
    assert "the run takes 2 of 5 windows of data.source.sources.late, less than once" in output
    assert "the run takes data.source.sources.code" not in output


def test_a_run_whose_sources_took_turns_by_another_rule_is_refused():
    order = MixedOrder({"a": 9}, [Phase(0, (Fraction(1),))], seed=1)
    with pytest.raises(UserError, match="took turns by the rule of another version"):
        order.refuse_other_past({**order.past(6), "rule": "another"})


@pytest.mark.slow
def test_the_command_evaluate_measures_the_whole_test_split_of_each_source(command):
    tests = [f"data.source.sources.{name}.test_fraction=0.1" for name in ("code", "prose")]
    command.train(*words(command), *tests, "run_dir=run")
    result = json.loads(command("evaluate", "run", "--split", "test", "--json").stdout)
    (place,) = (command.folder / "data").glob("mixture-*")
    splits = json.loads((place / "index.json").read_text())["splits"]
    sizes = [(splits[f"{name}/test"]["tokens"] - 1) // 32 * 32 for name in ("code", "prose")]
    assert result["tokens"] == sum(sizes)
    assert result["bits_per_byte"] > 0


@pytest.mark.slow
def test_one_tokenizer_is_learned_or_named_for_all_sources(command):
    run_words = [*words(command), "tokenizer=bpe", "data.source.tokenizer_from=code", "run_dir=run"]
    command.train(*run_words)
    (place,) = (command.folder / "data").glob("mixture-*")
    assert json.loads((place / "index.json").read_text())["tokenizer"]["kind"] == "bpe"


def test_epochs_that_the_run_has_no_room_for_are_one_line(command):
    run_words = [*words(command)[:-5], "+data.source.epochs.prose=9", "run_dir=run"]
    result = command.train(*run_words, status=2)
    assert "data.source.epochs takes 5,5" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (command.folder / "run").exists()
