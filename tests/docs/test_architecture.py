"""The picture of the layers equals its script's output; the script counts and lists correctly."""

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/architecture.py"
PICTURE = ROOT / "docs/architecture.svg"
if not SCRIPT.is_file():
    pytest.skip("no scripts/architecture.py here", allow_module_level=True)


@pytest.fixture(scope="module")
def architecture():
    spec = importlib.util.spec_from_file_location("architecture", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def package(tmp_path):
    """A package with the folders `launch`, `data`, and `extras`, and one that only it has."""
    files = {
        "config.py": "import pkg.data.data_settings\n",
        "launch/start.py": "from pkg.data import order, windows\nimport pkg.config, pkg.own.one\n",
        "launch/stop.py": "def stop():\n    from pkg.data.order import Order\n",
        "data/order.py": '"""The order.\n\nMore.\n"""\nfrom pkg.data import windows\nimport os\n',
        "data/windows.py": '"""The windows."""\nfrom pkg import config\n',
        "data/data_settings.py": '"""Settings."""\nfrom pkg.launch import start\n',
        "data/__init__.py": "",
        "own/one.py": "from pkg.data.data_settings import A, B\n",
        "extras/mine/one.py": "from pkg.launch import start\n",
        "extras/__init__.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "pkg"


@pytest.mark.skipif(not PICTURE.is_file(), reason="no docs/architecture.svg here")
def test_the_picture_is_current_else_draw_it_again(architecture):
    is_current = architecture.picture(architecture.PACKAGE) == PICTURE.read_text("utf-8")
    assert is_current, "docs/architecture.svg is old; draw it: python3 scripts/architecture.py"


def test_a_module_counts_once_for_each_file_that_imports_it(architecture, package):
    assert architecture.imports(package) == {
        ("launch", "data"): 3,
        ("launch", "floor"): 1,
        ("launch", "own"): 1,
        ("data", "floor"): 1,
        ("own", "floor"): 1,  # all settings are of the lowest layer, wherever they are
        ("extras", "launch"): 1,
    }


def test_a_count_is_rounded_down(architecture):
    counts = [1, 2, 4, 5, 9, 10, 49, 99, 1000]
    assert [*map(architecture.rounded, counts)] == [1, 2, 2, 5, 5, 10, 20, 50, 100]


def test_the_picture_has_each_layer_once_and_nothing_of_a_single_extra(architecture, package):
    drawn = architecture.picture(package)
    texts = [node.text for node in ElementTree.fromstring(drawn).iter() if node.get("class")]
    layers = ["launch", "own", "data", "floor", "extras"]
    assert [text for text in texts if text in architecture.ABOUT or text == "own"] == layers
    (package / "extras/mine/one.py").unlink()
    assert architecture.picture(package) == drawn
    assert package.name not in drawn


def test_text_is_at_least_12_pixels_high(architecture, package):
    sizes = re.findall(r"font-size: (\d+)px", architecture.picture(package))
    assert min(map(int, sizes)) >= 12


def test_files_are_listed_with_the_first_lines_of_their_docstrings(architecture, package):
    assert [*architecture.lines_about(package / "data")] == [
        "data_settings.py  Settings.",
        "order.py          The order.",
        "windows.py        The windows.",
    ]


def test_a_folder_is_named_by_its_path_or_its_name_in_the_package(
    architecture, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()  # prepared tokens
    folder = architecture.PACKAGE / "data"
    for name in ("data", str(folder)):
        assert architecture.main(["--files", name]) == 0
        assert capsys.readouterr().out.splitlines() == [*architecture.lines_about(folder)]
    with pytest.raises(SystemExit):
        architecture.main(["--files", "nowhere"])
    assert capsys.readouterr().err.endswith("nowhere is not a folder\n")
