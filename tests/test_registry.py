import pytest

from lockstep_gpt import extras
from lockstep_gpt.registry import addition, additions, asked, merged, resolved


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Create two more extras, one of which adds things."""
    added = 'NUMBERS = {"one": 1}\nADD = "operator:add"\nPLACE = "os.path"\n'
    for name, content in (("an_adding_one", added), ("a_plain_one", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(content)
    monkeypatch.setattr(extras, "__path__", [str(tmp_path)])


def test_an_installed_extra_adds_its_constants(two):  # noqa: ARG001
    assert list(additions("NUMBERS")) == [{"one": 1}]
    assert merged("NUMBERS") == {"one": 1}
    assert asked("ADD", 2, 3) == [5]
    assert addition("PLACE").sep == "/"


def test_a_constant_without_an_extra_is_missing_without_error(two):  # noqa: ARG001
    assert list(additions("COLORS")) == asked("COLORS") == []
    assert addition("COLORS") is None


def test_a_target_is_a_module_or_an_attribute():
    assert resolved("operator:add")(1, 2) == 3
    assert resolved("operator").__name__ == "operator"
    assert resolved(".registry:resolved") is resolved
