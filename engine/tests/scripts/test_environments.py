"""Which versions an environment gets, and which tool installs them."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ABOUT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
OF_ENGINE = tomllib.loads((ROOT / "engine/pyproject.toml").read_text("utf-8"))
DEMO = {
    "project": {
        "name": "demo",
        "dependencies": [
            "torch>=2.11,<2.16",
            "hydra-core>=1.3.7,<1.5; python_version < '3.14'",
            "hydra-core>=1.4.0rc3,<1.5; python_version >= '3.14'",
            "pyyaml",
        ],
        "optional-dependencies": {"more": ["needed>=0.22"], "other": ["torch>=2.11,<2.16"]},
    },
    "dependency-groups": {
        "dev": [{"include-group": "test"}, "demo[more]"],
        "test": ["demo[tests,types]", "pytest>=8"],
    },
}
LISTED = [
    *DEMO["project"]["dependencies"],
    *DEMO["project"]["optional-dependencies"]["more"],
    *DEMO["project"]["optional-dependencies"]["other"],
]
# A project without dependencies that builds without a network; its backend is next to it.
PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "demo"
version = "1"

[dependency-groups]
dev = []
"""
BACKEND = """\
import tomllib, zipfile

with open("pyproject.toml", "rb") as file:
    needed = tomllib.load(file)["project"].get("dependencies", [])
NEEDED = "".join(f"Requires-Dist: {each}\\n" for each in needed)

def build_editable(folder, config_settings=None, metadata_directory=None):
    with open("installed", "a") as log:
        log.write("once\\n")
    with zipfile.ZipFile(f"{folder}/demo-1-py3-none-any.whl", "w") as wheel:
        about = "Metadata-Version: 2.1\\nName: demo\\nVersion: 1\\n" + NEEDED
        wheel.writestr("demo-1.dist-info/METADATA", about)
        wheel.writestr("demo-1.dist-info/WHEEL", "Wheel-Version: 1.0\\n")
        wheel.writestr("demo-1.dist-info/RECORD", "")
    return "demo-1-py3-none-any.whl"
"""
UV = """\
#!{python}
import os, subprocess, sys
with open("{log}", "a") as log:
    log.write(os.environ.get("UV_FIND_LINKS", "") + " " + " ".join(sys.argv[1:]) + chr(10))
if os.path.exists("uv-fails"):
    sys.exit(2)
words = sys.argv[sys.argv.index("--python") + 2:]
sys.exit(subprocess.call([{python!r}, "-m", "pip", "--python", sys.argv[5], "install", *words]))
"""


def load(root: Path = ROOT):
    spec = importlib.util.spec_from_file_location("planted", root / "scripts/environments.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path):
    """A miniature project."""
    (tmp_path / "project/scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/environments.py", tmp_path / "project/scripts")
    for name, text in {"pyproject.toml": PROJECT, "backend.py": BACKEND}.items():
        (tmp_path / "project" / name).write_text(text)
    (tmp_path / "project/constraints.txt").write_text("# no pins\n")
    return tmp_path / "project"


def test_a_group_is_read_with_the_groups_that_it_includes():
    assert load().requirements("dev", DEMO) == [".[tests,types]", "pytest>=8", ".[more]"]


def test_the_oldest_versions_are_the_project_s_lower_bounds():
    assert load().limits("oldest", LISTED) == [
        "torch==2.11",
        "hydra-core==1.3.7; python_version < '3.14'",
        "hydra-core==1.4.0rc3; python_version >= '3.14'",
        "needed==0.22",
    ]


def test_the_newest_versions_are_unpinned_with_named_candidates():
    assert load().limits("newest", LISTED) == ["hydra-core>=1.4.0rc3"]


def requirements_of(about):
    """Return all requirements of a pyproject.toml, but for the engine itself."""
    project = about["project"]
    lists = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    return [each for listed in lists for each in listed if "lightning-lockstep" not in each]


@pytest.mark.parametrize("about", [ABOUT, OF_ENGINE], ids=["project", "engine"])
def test_all_that_is_needed_has_a_lower_bound(about):
    listed = requirements_of(about)
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in listed}
    bound = {re.match(r"[\w.-]+", limit)[0] for limit in load().limits("oldest", listed)}
    assert bound == names


def test_the_project_and_its_engine_agree_on_what_both_need():
    needs = {}
    for requirement in [*requirements_of(ABOUT), *requirements_of(OF_ENGINE)]:
        name, _, marker = requirement.partition(";")
        needs.setdefault((re.match(r"[\w.-]+", name)[0], marker), set()).add(requirement)
    assert [listed for listed in needs.values() if len(listed) > 1] == []
    both = {*requirements_of(ABOUT)} & {*requirements_of(OF_ENGINE)}
    assert "torch>=2.12,<2.16" in both


@pytest.mark.parametrize("about", [ABOUT, OF_ENGINE], ids=["project", "engine"])
def test_each_python_that_is_supported_has_one_requirement_of_each_name(about):
    low, high = re.match(r">=3\.(\d+),<3\.(\d+)", about["project"]["requires-python"]).groups()
    for minor in range(int(low), int(high)):
        names = []
        for requirement in about["project"]["dependencies"]:
            name, _, marker = requirement.partition(";")
            sign = re.fullmatch(r" python_version (<|>=) '3\.(\d+)'", marker)
            below = sign and minor < int(sign[2])
            if not sign or below == (sign[1] == "<"):
                names.append(re.match(r"[\w.-]+", name)[0])
        assert len(names) == len(set(names)), minor


def test_the_newest_versions_have_an_environment_per_day(root, monkeypatch):
    module = load(root)
    days = iter(["2026-11-01", "2026-11-02", "2026-11-02"])
    monkeypatch.setattr(module.time, "strftime", lambda _: next(days))
    first, second, third = (module.Environment("newest").fingerprints() for _ in range(3))
    assert first != second == third
    assert module.Environment().fingerprints() == module.Environment("oldest").fingerprints()


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True], ids=["uv", "uv fails, pip does it"])
def test_uv_installs_if_it_is_available(root, tmp_path, monkeypatch, quick_venv, fails):
    log = tmp_path / "uv-calls"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/uv").write_text(UV.format(python=sys.executable, log=log))
    (tmp_path / "bin/uv").chmod(0o755)
    if fails:
        (root / "uv-fails").touch()
    links = str(tmp_path / "wheels")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PIP_FIND_LINKS", links)
    for name, value in quick_venv.items():
        monkeypatch.setenv(name, value)
    load(root).Environment().set_up()
    assert (root / "installed").read_text() == "once\n"
    python = root / ".venv/bin/python"
    assert log.read_text() == f"{links} pip install -q --python {python} -c constraints.txt -e .\n"


def test_a_project_is_installed_with_its_engine_and_the_small_group(root):
    about = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    module = load(root)
    assert module.Environment()._needs([]) == ["-c", "constraints.txt", "-e", "."]
    shutil.copytree(ROOT / "engine", root / "engine", ignore=lambda *_: ["src", "tests"])
    assert module.Environment()._needs(["hub"]) == [
        "-c",
        "constraints.txt",
        "-e",
        ".[hub]",
        "-e",
        "engine",
    ]
    test = [each for each in about["dependency-groups"]["test"] if isinstance(each, str)]
    assert {re.match(r"[\w-]+", each)[0] for each in test} == {
        "hatchling",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
    }


def plant_wheel(folder: Path, version: str, name: str = "needed", text: str = "") -> Path:
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": text,
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, content in files.items():
            wheel.writestr(file if file.endswith(".py") else f"{about}/{file}", content)
    return path


@pytest.fixture(params=["uv", "pip"])
def installer(request, tmp_path):
    """The environment of a real installer that finds four versions in a folder, with no index."""
    (tmp_path / "wheels").mkdir()
    for version in ("1.0", "2.0", "2.5", "3.0rc1"):
        plant_wheel(tmp_path / "wheels", version)
    if request.param == "pip":
        return {"PATH": os.defpath, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels")}
    if not (uv := shutil.which("uv") or shutil.which("uv", path=Path(sys.executable).parent)):
        pytest.skip("no uv here")
    return {
        "PATH": f"{Path(uv).parent}:{os.defpath}",
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_FIND_LINKS": str(tmp_path / "wheels"),
        "UV_OFFLINE": "1",
        "PIP_INDEX_URL": "file:///none",  # if uv fails, pip must not step in
    }


NEEDS = """
dependencies = [
    "needed>=1.0,<4; python_version < '3.99'",
    "needed>=3.0rc1,<4; python_version >= '3.99'",
]
"""


# What would change what an installer does: variable -> value. A {path} is one of the test.
TROUBLE = {
    "PIP_ABI": "cp27",
    "PIP_DRY_RUN": "1",
    "PIP_EDITABLE": "/nowhere",
    "PIP_GROUP": "nothing",
    "PIP_IGNORE_INSTALLED": "1",
    "PIP_IMPLEMENTATION": "jy",
    "PIP_NO_DEPENDENCIES": "1",
    "PIP_NO_DEPS": "1",
    "PIP_PLATFORM": "win32",
    "PIP_PRE": "1",
    "PIP_PREFIX": "{path}/other",
    "PIP_PYTHON": "/nowhere/python",
    "PIP_PYTHON_VERSION": "2.7",
    "PIP_REQUIREMENT": "/nowhere/requirements.txt",
    "PIP_REQUIREMENTS_FROM_SCRIPT": "/nowhere/script.py",
    "PIP_REQUIRE_VIRTUALENV": "1",
    "PIP_ROOT": "{path}/other",
    "PIP_TARGET": "{path}/other",
    "PIP_USER": "1",
    "PYTHONHOME": sys.base_prefix,
    "PYTHONPATH": "{path}/other",
    "PYTHONUSERBASE": "{path}/other",
    "UV_NO_EDITABLE": "1",
    "UV_PRERELEASE": "allow",
    "UV_PROJECT": "/nowhere",
    "UV_PYTHON": "/nowhere/python",
    "UV_RESOLUTION": "lowest",
    "UV_SYSTEM_PYTHON": "1",
    "UV_WORKING_DIR": "/nowhere",
    "VIRTUAL_ENV": "{path}/other",
}
NEEDS_ONE = 'version = "1"\ndependencies = ["needed>=1.0,<4"]\n'
SET_UP = "import environments; environments.Environment('newest').set_up()"
SHOW = (
    "import importlib.metadata as installed; print(installed.version('demo'), "
    "installed.version('needed'), installed.distribution('demo').read_text('direct_url.json'))"
)


@pytest.fixture
def set_up(root, installer, quick_venv, tmp_path):
    """Set up the environment of the highest versions, with more variables."""
    (root / "pyproject.toml").write_text(PROJECT.replace('version = "1"\n', NEEDS_ONE))
    about = tmp_path / "other/needed-2.5.dist-info"  # elsewhere, it is there already
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: needed\nVersion: 2.5\n")

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        variables = {name: value.format(path=tmp_path) for name, value in variables.items()}
        paths = [str(root / "scripts"), *quick_venv.values(), variables.pop("PYTHONPATH", "")]
        path = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        return subprocess.run(
            [sys.executable, "-c", SET_UP],
            cwd=root,
            env=os.environ | installer | path | variables,
            capture_output=True,
            encoding="utf-8",
        )

    return run


def assert_installed(root):
    """All that the project needs is in its environment, which reads the project's source."""
    words = [root / ".venv-newest/bin/python", "-I", "-c", SHOW]
    done = subprocess.run(words, capture_output=True, encoding="utf-8")
    assert done.stdout.startswith("1 2.5 {"), done.stdout + done.stderr
    assert '"editable": true' in done.stdout.replace(":true", ": true")


def test_each_variable_that_is_dropped_is_tried():
    module = load()
    assert {*module.DROPPED, *module.OFF, "PIP_REQUIRE_VIRTUALENV"} == {*TROUBLE}


@pytest.mark.slow
@pytest.mark.parametrize("name", TROUBLE)
def test_a_variable_does_not_lead_installers_elsewhere(name, root, set_up, tmp_path):
    done = set_up(**{name: TROUBLE[name]})
    assert done.returncode == 0, done.stderr
    assert_installed(root)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["needed-2.5.dist-info"]


@pytest.mark.slow
@pytest.mark.parametrize("line", ["user = yes", "dry-run = true", "no-deps = 1", "pre = on"])
def test_a_switch_in_pip_s_files_does_not_either(line, root, set_up, tmp_path):
    (tmp_path / "pip.conf").write_text(f"[install]\n{line}\n")
    done = set_up(PIP_CONFIG_FILE=str(tmp_path / "pip.conf"))
    assert done.returncode == 0, done.stderr
    assert_installed(root)


@pytest.mark.slow
@pytest.mark.parametrize("installer", ["pip"], indirect=True)
@pytest.mark.parametrize(
    ("section", "line", "refused"),
    [
        ("global", "target = {path}", "pip's setting target={path} would not install"),
        ("install", "root = {path}", "pip's setting root={path} would not install"),
        ("install", "require-hashes = yes", "PIP_REQUIRE_HASHES=yes, but the project's pins"),
    ],
)
def test_a_place_in_pip_s_files_is_refused_by_name(section, line, refused, set_up, tmp_path):
    path = tmp_path / "elsewhere"
    written = f"[{section}]\n{line.format(path=path)}\n[download]\ndest = x\n"
    (tmp_path / "pip.conf").write_text(written)
    done = set_up(PIP_CONFIG_FILE=str(tmp_path / "pip.conf"))
    assert done.returncode == 2
    assert f"dev.py: {refused.format(path=path)}" in done.stderr.splitlines()[-1]
    assert "network" not in done.stderr
    assert not path.exists()
    done = set_up(PIP_CONFIG_FILE=os.devnull)  # what the line says
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_forbids_to_install_is_refused_by_name(set_up):
    done = set_up(PIP_REQUIRE_HASHES="1", UV_REQUIRE_HASHES="1")
    assert done.returncode == 2
    assert "_REQUIRE_HASHES=1, but the project's pins have no hashes" in done.stderr
    assert "network" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("installer", "name"),
    [("pip", "PIP_CONSTRAINT"), ("uv", "PIP_CONSTRAINT"), ("uv", "UV_CONSTRAINT")],
    indirect=["installer"],
)
def test_constraints_of_the_user_are_honored(name, root, set_up, tmp_path):
    (tmp_path / "limits").write_text("needed<2.5\n")
    done = set_up(**{name: str(tmp_path / "limits")})
    assert done.returncode == 0, done.stderr
    words = [root / ".venv-newest/bin/python", "-I", "-c", SHOW]
    assert subprocess.check_output(words, text=True).startswith("1 2.0 ")


@pytest.mark.slow
@pytest.mark.parametrize("installer", ["pip"], indirect=True)
def test_the_network_is_blamed_only_if_a_package_was_not_found(root, set_up, tmp_path):
    def last_line(**variables: str) -> str:
        done = set_up(**variables)
        assert done.returncode == 2
        return done.stderr.splitlines()[-1]

    assert "it needs the network, or an index" in last_line(PIP_FIND_LINKS=str(tmp_path))
    (root / "backend.py").write_text("raise RuntimeError\n")
    assert last_line() == "dev.py: pip failed, see above"


def test_an_installer_that_installs_nothing_is_found_out(root, monkeypatch, quick_venv):
    for name, value in quick_venv.items():
        monkeypatch.setenv(name, value)
    environment = load(root).Environment()
    words = [sys.executable, "-c", ""]
    monkeypatch.setattr(environment, "_installers", lambda: [(words, {**os.environ})])
    with pytest.raises(SystemExit):
        environment.set_up()
    assert not environment.stamp.exists()


@pytest.mark.slow
def test_real_installers_take_the_versions_of_each_set(root, installer, quick_venv):
    text = PROJECT.replace('version = "1"\n', f'version = "1"{NEEDS}')
    pins = '[tool.uv]\nconstraint-dependencies = ["needed==2.0"]\n'
    (root / "pyproject.toml").write_text(text + pins)
    (root / "constraints.txt").write_text("needed==2.0\n")
    path = os.pathsep.join([str(root / "scripts"), *quick_venv.values()])
    version_of_set = {}
    for versions in ("oldest", "pinned", "newest"):
        program = (
            f"import environments; environment = environments.Environment({versions!r}); "
            "environment.set_up(everything=True); print(environment.describe())"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=root,
            env=os.environ | installer | {"PYTHONPATH": path},
            capture_output=True,
            encoding="utf-8",
        )
        assert done.returncode == 0, done.stderr
        version_of_set[versions] = done.stdout.split(", ")[1].strip()
    assert version_of_set == {
        "oldest": "needed 1.0",
        "pinned": "needed 2.0",
        "newest": "needed 3.0rc1",
    }


@pytest.mark.slow
def test_only_what_has_changed_is_installed_again(root, installer, quick_venv, tmp_path):
    """A wheel of the same name and version that is another file, and an engine by path or not."""
    path = os.pathsep.join([str(root / "scripts"), *quick_venv.values()])
    names = ("needed", "lightning_lockstep")
    show = f"import {', '.join(names)}; print({', '.join(f'{name}.text' for name in names)})"

    def installed(text: str, *, by_path: bool = False) -> str:
        """Build wheels with a text, set up, and return what the environment has of them."""
        wheels = [plant_wheel(tmp_path, "1", name, f"text = {text!r}") for name in names]
        needs = [f"{wheel.name.partition('-1')[0]} @ {wheel.as_uri()}" for wheel in wheels]
        shutil.rmtree(root / "engine", ignore_errors=True)
        if by_path:
            needs[1] = "lightning-lockstep"
            (root / "engine").mkdir()
            for file, content in (("pyproject.toml", PROJECT), ("backend.py", BACKEND)):
                of_engine = content.replace('"demo', '"lightning_lockstep')
                of_engine = of_engine.replace("Name: demo", "Name: lightning-lockstep")
                of_engine = of_engine.replace("/demo", "/lightning_lockstep")
                (root / "engine" / file).write_text(of_engine)
        listed = f'version = "1"\ndependencies = {[*map(normal, needs)]}\n'
        (root / "pyproject.toml").write_text(PROJECT.replace('version = "1"\n', listed))
        done = subprocess.run(
            [sys.executable, "-c", "import environments; environments.Environment().set_up()"],
            cwd=root,
            env=os.environ | installer | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        words = [root / ".venv/bin/python", "-c", show]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True).stdout.strip()

    assert installed("first", by_path=True) == ""  # this engine has metadata only
    mark = root / ".venv/mark"
    mark.touch()
    assert installed("first") == "first first"
    assert installed("second") == "second second"
    assert installed("second", by_path=True) == ""
    assert installed("second") == "second second"
    assert mark.exists()  # it was never made anew


def normal(requirement: str) -> str:
    """Return a requirement with the name as people write it."""
    return requirement.replace("lightning_lockstep @", "lightning-lockstep @")


def test_a_linked_environment_is_not_cleared(root, tmp_path):
    """It may be that of another checkout."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").touch()
    environment = load(root).Environment()
    environment.folder.symlink_to(other)
    with pytest.raises(SystemExit):
        environment.set_up()
    assert (other / "precious").exists()
