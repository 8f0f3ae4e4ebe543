import pytest

from lockstep_gpt.whole_files import replace_text, replacing


def test_a_file_is_replaced_atomically_without_leftovers(tmp_path):
    path = tmp_path / "a.json"
    replace_text(path, "old")
    with replacing(path) as file:
        file.write("naïve".encode())
        assert path.read_text() == "old"
    assert path.read_text("utf-8") == "naïve"
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_everything_is_as_before(tmp_path):
    path = tmp_path / "a.json"
    replace_text(path, "old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"half of", "it"])
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_gives_the_system_s_error(tmp_path):
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "nowhere/a"):
        pass
