"""YAML files of settings, as people write them."""

import pytest
from omegaconf import OmegaConf

from lockstep_gpt.config_files import config_folders, misread_value
from lockstep_gpt.launch.quoting import TEXTS

OTHER_NUMBERS = {"010": 8, "-017": -15, "1:30": 90, "1:30:00": 5400}
OTHER_TEXTS = {"no": False, "Yes": True, "1e3": 1000.0, "0x1F": 31, "1_0": 10, "1.10": 1.1}


@pytest.fixture
def line_of(tmp_path):
    def write(text):
        file = tmp_path / "own.yaml"
        file.write_text(f"# @package _global_\n{text}\n")
        return misread_value(file, TEXTS)

    return write


@pytest.mark.parametrize("written", OTHER_NUMBERS)
def test_a_number_of_another_base_is_named_with_what_yaml_reads(line_of, tmp_path, written):
    read = OTHER_NUMBERS[written]
    assert OmegaConf.create(f"a: {written}").a == read  # else there would be nothing to refuse
    assert line_of(f"model:\n  n_layer: {written}  # layers") == (
        f"{tmp_path}/own.yaml, line 3: YAML reads model.n_layer: {written} as {read}; write a "
        f"number without colons or a leading 0; quote a text, as in '{written}'"
    )
    assert line_of(f"loss_at: [1, {written}]") is not None


@pytest.mark.parametrize("written", OTHER_TEXTS)
def test_a_name_that_yaml_changes_needs_quotes(line_of, written):
    read = OTHER_TEXTS[written]
    assert OmegaConf.create(f"a: {written}").a == read
    line = f"line 2: YAML reads run_name: {written} as {read}; quote a text, as in '{written}'"
    assert line in line_of(f"run_name: {written}")
    assert line_of(f"run_name: '{written}'") is None
    assert line_of(f"other: {written}") is None


@pytest.mark.parametrize(
    "text",
    ["seed: 0", "seed: 10", "lr: 0.1", "lr: 1e-3", "name: a:1", "run_name: null", "run_name:", ""],
)
def test_what_yaml_reads_as_written_is_right(line_of, text):
    assert line_of(text) is None


def test_no_file_of_ours_has_a_value_that_yaml_changes():
    files = [file for folder in config_folders() for file in folder.rglob("*.yaml")]
    assert files
    assert [line for file in files if (line := misread_value(file, TEXTS))] == []


def test_a_recipe_with_such_a_value_is_refused_before_its_run_starts(command):
    folder = command.folder / "own/experiment"
    folder.mkdir(parents=True)
    recipe = "# @package _global_\ndefaults:\n  - smoke\nmax_steps: 010\n"
    (folder / "mine.yaml").write_text(recipe)
    words = ["--config-dir", str(folder.parent), "experiment=mine", "run_dir=run"]
    done = command("train", *words, status=2)
    assert f"{folder}/mine.yaml, line 4: YAML reads max_steps: 010 as 8; " in done.stderr
    assert not (command.folder / "run").exists()
