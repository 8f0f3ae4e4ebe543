import re

import pytest

from lockstep_gpt import catalog, config, extras, registry
from lockstep_gpt.errors import UserError
from lockstep_gpt.registry import ARGUMENTS, COMMANDS, Command, additions, resolved

KINDS = [kind for kind in vars(registry).values() if isinstance(kind, registry.Kind)]


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Create two extras and no others; one of them adds things."""
    added = """
from lockstep_gpt.registry import Command
COMMANDS = {"sum": Command("builtins:sum", "add numbers", False)}
ARGUMENTS = "builtins:sorted"
"""
    for name, content in (("an_adding_one", added), ("a_plain_one", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(content)
    monkeypatch.setattr(extras, "__path__", [str(tmp_path)])


def test_an_installed_extra_adds_to_its_kinds(two):  # noqa: ARG001
    assert additions(COMMANDS) == [{"sum": Command("builtins:sum", "add numbers", False)}]
    assert [rewrite(["b", "a"]) for rewrite in additions(ARGUMENTS)] == [["a", "b"]]
    assert registry.installed() == ["a_plain_one", "an_adding_one"]


def test_a_kind_without_an_extra_is_empty(two):  # noqa: ARG001
    assert additions(registry.CHECK) == []
    assert registry.settings_classes() == {}
    assert all(registry.optional_part(extra, "anything") is None for extra in catalog.CATALOG)


def test_extras_declare_nothing_but_the_kinds():
    names = {kind.name for kind in KINDS}
    for extra in registry.installed():
        package = resolved(f".extras.{extra}")
        assert {name for name in vars(package) if name.isupper()} <= names


def test_a_target_is_a_module_or_an_attribute():
    assert resolved("operator:add")(1, 2) == 3
    assert resolved("operator").__name__ == "operator"
    assert resolved(".registry:resolved") is resolved


@pytest.mark.parametrize("extra", registry.installed())
def test_the_catalog_says_what_an_extra_offers(extra):
    offer = catalog.CATALOG[extra]
    package = resolved(f".extras.{extra}")
    assert set(offer.commands) == set(getattr(package, "COMMANDS", {}))
    assert set(offer.groups) == set(getattr(package, "SETTINGS", {}))
    folder = registry.config_folders_of_extras().get(extra)
    files = sorted(folder.rglob("*.yaml")) if folder else []
    places = [path.relative_to(folder).with_suffix("").as_posix() for path in files]
    assert sorted(offer.choices) == sorted(place.replace("/", "=", 1) for place in places)


def test_what_is_absent_is_named_with_the_command_that_adds_it(
    two,  # noqa: ARG001
    capsys,
    monkeypatch,
):
    from lockstep_gpt import cli

    monkeypatch.delitem(cli.COMMANDS, "panel", raising=False)  # if it was imported before
    assert cli.main(["panel"]) == 2
    assert f"panel needs {catalog.how_to_add('pages')}" in capsys.readouterr().err
    assert catalog.extra_of_group("documents") == "datasets"
    assert catalog.extra_of_choice("data", "mixture") == "datasets"
    assert catalog.extra_of_target(f"{extras.__name__}.pages.sync_panel.SyncPanel") == "pages"
    assert catalog.how_to_add("pages").endswith("python3 scripts/dev.py update --add pages")


def test_a_run_with_settings_of_an_absent_extra_is_refused_in_one_line(composed, two):  # noqa: ARG001
    values = {"max_steps": 1, "documents": {"mask": True}}
    line = f"documents.mask=true needs {catalog.how_to_add('datasets')}"
    with pytest.raises(UserError, match=re.escape(line)):
        config.from_container(values)
