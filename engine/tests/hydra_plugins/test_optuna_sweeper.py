"""The Optuna sweeper on a job whose best setting is known."""

import math
import sys

import pytest

from lockstep.errors import UserError
from lockstep.launch import composed
from lockstep.launch.main import training

SEARCH = ["--multirun", "hydra/sweeper=optuna", "run_dir=sweep"]


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def compose(words, job):
    composed.call(training().source, composed.for_hydra(words), job)


def search(*space, job, trials=10):
    tried = []

    def count(config):
        tried.append(config)
        return job(config)

    compose([*SEARCH, f"hydra.sweeper.n_trials={trials}", *space], count)
    return tried


def distance(config):
    """The minimum is 0, at a learning rate of 3e-3."""
    return abs(math.log10(config.optim.lr / 3e-3))


@pytest.mark.slow
def test_it_finds_a_better_learning_rate_than_chance():
    tried = search("optim.lr=tag(log,interval(1e-6,1e-1))", job=distance, trials=30)
    assert len(tried) == 30
    assert min(map(distance, tried)) < 0.1  # 2 % of the range; 30 draws by chance: 1 in 2
    late = sum(map(distance, tried[20:])) / 10
    assert late < sum(map(distance, tried[:10])) / 10 / 2


def test_choices_ranges_and_intervals_keep_their_kinds():
    space = ["schedule.decay=cosine,wsd", "model.n_head=1,2,4", "max_steps=int(interval(10,20))"]
    tried = search(*space, job=lambda config: float(config.max_steps))
    assert {config.schedule.decay for config in tried} == {"cosine", "wsd"}
    assert {config.model.n_head for config in tried} == {1, 2, 4}
    assert all(10 <= config.max_steps <= 20 for config in tried)


@pytest.mark.parametrize(
    ("space", "remedy"),
    [
        ("interval(1,0.1)", "an interval starts at its lower end; write optim.lr=interval(0.1,1"),
        ("tag(log,interval(0,0.1))", "with log, an interval must be above 0"),
    ],
)
def test_an_interval_without_values_is_refused_by_its_setting(space, remedy):
    with pytest.raises(UserError) as error:
        search(f"optim.lr={space}", job=distance)
    assert str(error.value).startswith(f"optim.lr={space}: {remedy}")


def test_failed_jobs_do_not_end_the_search(capsys):
    tried = search("seed=1,2,3", job=lambda config: math.nan if config.seed == 1 else 1.0)
    assert len(tried) == 10
    assert "best of 10 jobs: 1.0000 with" in capsys.readouterr().out


@pytest.mark.slow
def test_a_stored_study_continues_under_its_name(capsys):
    words = ["hydra.sweeper.storage=sqlite:///study.db", "hydra.sweeper.study_name=mine"]
    for job in (lambda config: float(config.seed), lambda _: 4.0):
        search(*words, "seed=1,2,3", job=job)
    printed = capsys.readouterr().out
    assert "best of 10 jobs: 1.0000 with seed: '1'" in printed
    assert "best of 20 jobs: 1.0000 with seed: '1'" in printed


def test_a_stored_study_of_another_kind_is_refused():
    words = ["hydra.sweeper.storage=sqlite:///study.db", "hydra.sweeper.study_name=mine"]
    search(*words, "seed=1,2", job=distance, trials=1)
    with pytest.raises(UserError) as caught:
        search(*words, "seed=1,2", "checkpoint.mode=max", job=distance, trials=1)
    assert str(caught.value) == (
        "hydra.sweeper.direction=maximize but the study mine in sqlite:///study.db is to minimize; "
        "set another hydra.sweeper.study_name, or that direction, with the checkpoint.mode that "
        "fits it"
    )
    with pytest.raises(UserError, match=r"^seed=1,3: the study mine in .+ has other values for it"):
        search(*words, "seed=1,3", job=distance, trials=1)


@pytest.mark.slow
def test_another_sampler_of_optuna_can_be_chosen():
    sampler = "hydra.sweeper.sampler._target_=optuna.samplers.RandomSampler"
    space = "optim.lr=tag(log,interval(1e-6,1e-1))"
    tried = search(sampler, space, job=distance, trials=30)
    assert len({config.optim.lr for config in tried}) == 30
    late = sum(map(distance, tried[20:])) / 10
    assert late > 0.5  # it does not come closer, as the default one does


@pytest.mark.parametrize("direction", [[], ["hydra.sweeper.direction=maximize"]])
def test_the_largest_value_can_be_the_best(capsys, direction):
    words = ["checkpoint.mode=max", *direction, "seed=1,2,3"]
    search(*words, job=lambda config: float(config.seed))
    assert "best of 10 jobs: 3.0000 with seed: '3'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            "direction=maximize",
            "hydra.sweeper.direction=maximize would search for the worst val/loss: "
            "checkpoint.mode=min; set checkpoint.mode=max too, or leave the direction out",
        ),
        ("direction=up", "hydra.sweeper.direction=up is not one of minimize, maximize"),
        ("storage=nope://x", r"hydra.sweeper.storage=nope://x cannot be opened \(.+\); name a .+"),
        ("n_trials=0", "hydra.sweeper.n_trials=0 must be a whole number above 0"),
        ("n_jobs=2", "hydra.sweeper.n_jobs=2 must be 1: each job has all devices, .+"),
        ("n_trials=true", "hydra.sweeper.n_trials=true must be a whole number above 0"),
        ("n_trials=few", "hydra.sweeper.n_trials=few must be a whole number above 0"),
    ],
)
def test_a_wrong_setting_of_the_sweeper_is_one_line(setting, line):
    with pytest.raises(UserError, match=f"^{line}$"):
        search(f"hydra.sweeper.{setting}", "seed=1,2", job=distance)


@pytest.mark.parametrize("word", ["checkpoint.mode=min,max", "checkpoint.monitor=a,b"])
def test_jobs_whose_values_cannot_be_compared_are_refused(word):
    line = f"^{word} decides what is searched for; set one value, the same for all jobs$"
    with pytest.raises(UserError, match=line):
        search("seed=1,2", word, job=distance)


def test_without_optuna_a_search_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    line = r"hydra/sweeper=optuna needs optuna, which is not installed; run: .+ install .*\bsweep\b"
    with pytest.raises(UserError, match=line):
        compose(["--multirun", "experiment=search", "run_dir=sweep"], distance)


def test_a_sweep_without_a_setting_is_rejected():
    with pytest.raises(UserError, match="needs a setting to search in"):
        search("seed=1", job=distance)


def test_the_preset_s_search_space_can_be_extended_on_the_command_line():
    words = ["--multirun", "experiment=search", "run_dir=sweep", "hydra.sweeper.n_trials=6"]
    tried = []

    def job(config):
        tried.append(config)
        return distance(config)

    compose([*words, "optim.weight_decay=0.2,0.3"], job)
    assert len({config.optim.lr for config in tried}) == 6
    assert all(3e-4 <= config.optim.lr <= 3e-2 for config in tried)
    assert {config.optim.weight_decay for config in tried} <= {0.2, 0.3}
    assert {config.max_steps for config in tried} == {300}


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_setting_of_the_command_line_replaces_the_preset_s_search_space(prefix):
    words = ["--multirun", "hydra/sweeper=optuna", "run_dir=sweep", "hydra.sweeper.n_trials=1"]
    space = "+hydra.sweeper.params={%s: '1e-4,1e-2'}"
    tried = []

    def job(config):
        tried.append(config)
        return 1.0

    name = "optim.extra" if prefix == "+" else "optim.lr"
    compose([*words, space % name, f"{prefix}{name}=3e-3", "seed=1,2"], job)
    assert [config.optim[name.removeprefix("optim.")] for config in tried] == [3e-3]
