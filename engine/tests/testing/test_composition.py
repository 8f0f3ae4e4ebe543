"""`choices` and `assert_composes`: the YAML files of a project, whatever is in them."""

import pytest

from lockstep.testing import assert_composes, choices


@pytest.fixture
def folder(tmp_path):
    files = {
        "train.yaml": "defaults: [{model: linear}, _self_, {experiment: small}]\nsteps: ???\n",
        "model/linear.yaml": "_target_: torch.nn.Linear\n_partial_: true\nin_features: 2\n",
        "model/open.yaml": "_target_: torch.nn.Linear\n_partial_: true\nin_features: ???\n",
        "model/other.yaml": "_target_: torch.nn.Flatten\n_partial_: true\n",
        "experiment/small.yaml": "# @package _global_\nsteps: 1\nmodel:\n  out_features: 3\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_choices_are_the_files_that_are_there(folder):
    expected = ["experiment=small", "model=linear", "model=open", "model=other"]
    assert choices(folder) == expected
    (folder / "model/other.yaml").unlink()
    assert choices(folder) == expected[:-1]


def test_each_composes_also_one_that_the_default_experiment_does_not_fit(folder):
    for choice in choices(folder):
        assert_composes(folder, choice)


def test_a_main_file_without_an_experiment_composes(folder):
    (folder / "train.yaml").write_text("defaults: [{model: linear}, _self_]\n")
    assert_composes(folder, "model=other")


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        (
            "_target_: lockstep.batch.Butch\n",
            r"^model=linear: model\._target_=lockstep\.batch\.Butch: ",
        ),
        ("_target_: torch.nn.Linear\nin_feature: 2\n", "Linear has no argument in_feature; did"),
    ],
)
def test_a_mistake_is_one_line_with_its_choice(folder, line, mistake):
    (folder / "model/linear.yaml").write_text(line)
    with pytest.raises(AssertionError, match=mistake) as failure:
        assert_composes(folder, "model=linear")
    assert "\n" not in str(failure.value)
