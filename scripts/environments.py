"""Environments of the project and its requirements: .venv has the pins, others are for tests.

oldest  the lowest versions that pyproject.toml allows of what the project itself needs
pinned  those of constraints.txt
newest  the highest that pyproject.toml allows, prereleases included where it names one
"""
# Python 3.6 must still be able to start this, because dev.py imports it.

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import typing
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

POSIX = os.name == "posix"
if POSIX:
    import fcntl
ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "constraints.txt"
ENGINE = "engine"  # its folder, if the project has it as source
ENGINE_NAME = "lightning-lockstep"  # in requirements
FILE = re.compile(r"[^;]*@ *(file:[^ ;]+)")  # a requirement of a wheel on this machine, its address
SETS = ("oldest", "pinned", "newest")
# Variables that change what pip or uv does have one of three decisions. All others are honored, as
# are those of indexes, proxies, certificates, constraints, and builds, and PIP_REQUIRE_VIRTUALENV.
# 1. Dropped; in pip's files, the settings of these names are refused.
DROPPED = (
    "PIP_ABI",  # wheels of another platform
    "PIP_EDITABLE",  # more than the project needs
    "PIP_GROUP",  # the same
    "PIP_IMPLEMENTATION",  # wheels of another Python
    "PIP_PLATFORM",  # wheels of another platform
    "PIP_PREFIX",  # into another folder
    "PIP_PYTHON",  # into another Python's environment
    "PIP_PYTHON_VERSION",  # wheels of another Python
    "PIP_REQUIREMENT",  # more than the project needs
    "PIP_REQUIREMENTS_FROM_SCRIPT",  # the same
    "PIP_ROOT",  # into another folder
    "PIP_TARGET",  # the same
    "PYTHONHOME",  # Python would be that of another folder, also when the project runs
    "PYTHONPATH",  # what is there would count as installed
    "PYTHONUSERBASE",  # of packages outside any environment
    "UV_NO_EDITABLE",  # later changes of the source would have no effect
    "UV_PRERELEASE",  # the set of versions decides this
    "UV_PROJECT",  # another project's pins
    "UV_PYTHON",  # into another Python's environment
    "UV_RESOLUTION",  # the set of versions decides this
    "UV_SYSTEM_PYTHON",  # into the system
    "UV_WORKING_DIR",  # another project
    "VIRTUAL_ENV",  # into another environment
)
# 2. Switched off, which also overrules pip's files.
OFF = (
    "PIP_DRY_RUN",  # nothing would be installed
    "PIP_IGNORE_INSTALLED",  # files of two versions would be mixed
    "PIP_NO_DEPENDENCIES",  # what the project needs would be missing
    "PIP_NO_DEPS",  # the same
    "PIP_PRE",  # the set of versions decides this
    "PIP_USER",  # outside the environment, so pip refuses it
)
# 3. Refused: they forbid what has to be done.
REFUSED = (
    "PIP_REQUIRE_HASHES",  # the pins have none
    "UV_REQUIRE_HASHES",  # the same
)
FALSE = ("", "0", "f", "false", "n", "no", "off")  # as pip reads switches
PIP_SETTING = re.compile(r"(?:global|install|:env:)\.([\w-]+)=(['\"])(.*)\2", flags=re.MULTILINE)
# pip has not found a package, or could not ask for it.
UNREACHED = re.compile(
    "could not find a version|no matching distribution|retrying|connection|timed? ?out|proxy|ssl|"
    "certificate|name resolution|http error",
    flags=re.IGNORECASE,
)
UV_NAMES = {
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
}
# Where uv reads the pins.
UV_PINS = re.compile(r"^constraint-dependencies = \[.*?\]\n", flags=re.MULTILINE | re.DOTALL)
DEV = "+dev"  # in the stamp, next to optional dependencies: the dependency group is installed
REQUIREMENT = re.compile(r"([\w.-]+)>=([\w.]+)[^;]*(;.*)?")
VERSIONS_PROGRAM = """\
import importlib.metadata as installed, platform, sys
found = ["Python " + platform.python_version()]
for name in sys.argv[1:]:
    try:
        found.append(name + " " + installed.version(name))
    except installed.PackageNotFoundError:
        found.append("no " + name)
print(*found, sep=", ")
"""
NEEDED_BY_PYTEST = ("pytest", "pytest_timeout", "xdist")  # or it does not start


class Environment:
    """A folder with the project and one set of versions.

    Args:
        versions: one of `SETS`.
    """

    def __init__(self, versions: str = "pinned") -> None:
        self.versions = versions
        self.folder = ROOT / (".venv" if versions == "pinned" else ".venv-" + versions)
        self.python = str(self.folder / ("bin/python" if POSIX else "Scripts/python.exe"))
        self.stamp = self.folder / "set-up.sha256"  # written last: without it, it is incomplete

    def use_active(self) -> bool:
        """Use the Python that runs this, if it can run the tests and there is no environment yet.

        It must import this checkout's package, and not another's. So tests run on a GPU machine
        without a network whose image has the packages.
        """
        package = importlib.util.find_spec("lockstep_gpt")
        if self._stamped() or Path(sys.prefix) == self.folder or package is None:
            return False
        if not Path(str(package.origin)).resolve().is_relative_to(ROOT):
            return False
        if not all(map(importlib.util.find_spec, NEEDED_BY_PYTEST)):
            return False
        self.versions = "active"
        self.folder = Path(sys.prefix)
        self.python = sys.executable
        return True

    def set_up(self, everything: bool = False, names: "tuple[str, ...]" = ()) -> None:
        """Install the project and its versions in the environment, unless they are there already.

        This includes the optional dependencies that an earlier call named.

        Args:
            everything: also the dependency group `dev`, and the optional dependencies in it.
            names: also these optional dependencies.
        """
        if self._holds(self._wanted(everything, names)):
            return
        if names and self._holds(self._wanted(everything, ())):
            say(f"installing {' '.join(names)} in {self.folder.name} ...")
        elif everything and self._holds(self._wanted(everything=False, names=names)):
            say(f"installing what tests need in {self.folder.name} (a minute, once) ...")
        elif self._stamped()[:1] == self.fingerprints()[:1]:
            say(f"installing what has changed in {self.folder.name} ...")
        else:
            say(f"setting up {self.folder.name} (a few minutes, once) ...")
        with PINS.open("r+b") as lock:
            if POSIX:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another call may be installing
            os.set_inheritable(lock.fileno(), True)  # a pip that outlives us keeps the lock
            wanted = self._wanted(everything, names)  # what that call installed is kept
            if not self._holds(wanted):
                self._install(wanted)
        say(f"{self.folder.name} is ready")

    def _wanted(self, everything: bool, names: "tuple[str, ...]") -> "list[str]":
        """Return the content of the stamp of an environment that has what is needed."""
        declared = optional_dependencies()
        installed = [name for name in self._stamped()[2:] if name in declared]
        group = [DEV] if everything else []
        return [*self.fingerprints(), *sorted({*installed, *names}), *group]

    def fingerprints(self) -> "list[str]":
        """Return hashes of what it depends on: this folder and Python; the requirements.

        A wheel that is named by its file may be built again under the same name and version.
        """
        place = f"{sys.version_info[:2]} ".encode() + os.fsencode(ROOT)
        files = [ROOT / "pyproject.toml", ROOT / ENGINE / "pyproject.toml", PINS, *_wheels()]
        needs = b"".join(file.read_bytes() for file in files if file.is_file())
        if self.versions == "newest":  # as of today
            needs += time.strftime("%Y-%m-%d").encode()
        return [hashlib.sha256(part).hexdigest() for part in (place, needs)]

    def describe(self) -> str:
        """Return the versions of Python and of what the project itself needs, in one line."""
        needs = map(REQUIREMENT.fullmatch, _dependencies())
        names = dict.fromkeys(requirement[1] for requirement in needs if requirement)
        program = [self.python, "-c", VERSIONS_PROGRAM, *names]
        return subprocess.check_output(program).decode().strip()

    def _stamped(self) -> "list[str]":
        if not self.stamp.is_file() or not Path(self.python).exists():
            return []
        return self.stamp.read_text().split()

    def _holds(self, wanted: "list[str]") -> bool:
        stamped = self._stamped()
        return stamped[:2] == wanted[:2] and set(wanted) <= set(stamped)

    def _install(self, wanted: "list[str]") -> None:
        stamped = self._stamped()
        folder = str(self.folder)
        rebuild = stamped[:1] != wanted[:1]  # another folder or Python, or incomplete
        if self.versions != "pinned":  # remove what an earlier resolution left
            rebuild = rebuild or stamped[:2] != wanted[:2]
        if rebuild and self.folder.is_symlink():
            refuse(
                f"{folder} is a link to {self.folder.resolve()}, which would be cleared; remove "
                "the link, and an environment is made here"
            )
        self.stamp.unlink(missing_ok=True)
        if rebuild and subprocess.call([sys.executable, "-m", "venv", "--clear", folder], cwd=ROOT):
            refuse("cannot make .venv, see above; on Debian and Ubuntu: apt install python3-venv")
        calls = [self._needs(wanted[2:])]
        again = [] if rebuild else _to_install_again()
        if again:
            calls.append(["--force-reinstall", "--no-deps", *calls[0][:2], *again])
        try:
            self._call_installers(calls)
        except SystemExit:
            if not rebuild:
                self.stamp.write_text(" ".join(stamped))  # the previous content is still valid
            raise
        self.stamp.write_text(" ".join(wanted))

    def _call_installers(self, calls: "list[list[str]]") -> None:
        """Let one installer after the other make all calls, until one of them can."""
        for installer, variables in self._installers():
            with tempfile.TemporaryDirectory() as elsewhere:
                # uv reads the pins of the pyproject.toml in the folder where it is started.
                start = str(ROOT) if self.versions == "pinned" else elsewhere
                for words in calls:
                    done = subprocess.run(
                        [*installer, *words],
                        cwd=start,
                        env=variables,
                        close_fds=False,
                        capture_output=True,
                        errors="replace",
                    )
                    if done.returncode:
                        break
            if not done.returncode and self._has_project():
                return
        output = done.stdout + done.stderr
        sys.stderr.write(output)
        if not done.returncode:
            refuse(
                f"pip has installed nothing in {self.folder.name}, perhaps because of its "
                f"settings, which `{self.python} -m pip config list` shows"
            )
        if UNREACHED.search(output):
            refuse(
                "pip failed, see above; it needs the network, or an index that has this, or "
                "PIP_FIND_LINKS=FOLDER"
            )
        refuse("pip failed, see above")

    def _has_project(self) -> bool:
        """Return whether the project is here; settings that we do not know may lead elsewhere."""
        name = _about()["project"]["name"]
        program = "import importlib.metadata, sys; importlib.metadata.version(sys.argv[1])"
        words = [self.python, "-I", "-c", program, name]
        return not subprocess.call(words, stderr=subprocess.DEVNULL)

    def _refuse_settings(self) -> None:
        """Refuse settings of pip with which it would not install what is needed here."""
        words = [self.python, "-m", "pip", "config", "list"]
        done = subprocess.run(words, env=own_variables(), stdout=subprocess.PIPE, errors="replace")
        if done.returncode:
            refuse("pip cannot read its settings, see above")
        for name, _, value in PIP_SETTING.findall(done.stdout):
            variable = "PIP_" + name.upper().replace("-", "_")
            if variable in REFUSED and is_on(value):
                _refuse_hashes(variable, value)
            if variable in DROPPED:
                refuse(
                    f"pip's setting {name}={value} would not install what is needed in "
                    f"{self.folder.name}; remove it from pip's files, which `{self.python} -m pip "
                    f"config debug` lists, or set PIP_CONFIG_FILE={os.devnull}"
                )

    def _needs(self, names: "list[str]") -> "list[str]":
        """Return the requirements to install, in the form that pip and uv accept.

        Args:
            names: optional dependencies, and `DEV` if the dependency group is needed.
        """
        if self.versions == "pinned":
            pins = PINS.name
            project, engine = ".", ENGINE
        else:
            listed = [*_dependencies(), *_optional_requirements()]
            lines = "".join(f"{line}\n" for line in limits(self.versions, listed))
            path = self.folder / "constraints.txt"
            path.write_text(lines)
            pins = str(path)
            project, engine = str(ROOT), str(ROOT / ENGINE)
        extras = []
        others = []
        needed = requirements("dev", _about()) if DEV in names else []
        for requirement in needed:
            if requirement[0] == ".":  # such as .[cluster,hub]
                extras += requirement[2:-1].split(",")
            else:
                others.append(requirement)
        extras += [name for name in names if name != DEV and name not in extras]
        if extras:
            project += f"[{','.join(extras)}]"
        if _has_engine():
            others = ["-e", engine, *others]
        return ["-c", pins, "-e", project, *others]

    def _installers(self) -> "typing.Iterator[tuple[list[str], dict[str, str]]]":
        """Yield the installers and their environment variables: uv if there is one, then pip.

        pip's variables for package locations also apply to uv, unless uv has its own.
        """
        variables = own_variables()
        uv = shutil.which("uv")
        if uv:
            if is_on(variables.get("UV_REQUIRE_HASHES", "")):
                _refuse_hashes("UV_REQUIRE_HASHES", variables["UV_REQUIRE_HASHES"])
            words = [uv, "pip", "install", "-q", "--python", self.python]
            if is_on(variables.get("PIP_NO_INDEX", "")):  # uv has no such variable
                words.append("--no-index")
            # uv does not read its variable next to our option.
            limits = variables.get("UV_CONSTRAINT") or variables.get("PIP_CONSTRAINT", "")
            words += [word for file in limits.split() for word in ("-c", file)]
            named = {UV_NAMES[name]: variables[name] for name in UV_NAMES if variables.get(name)}
            yield words, {**named, **variables}
        self._refuse_settings()
        # Compiling all of torch takes longer than what imports need, which they compile themselves.
        yield [self.python, "-m", "pip", "install", "-q", "--no-compile"], variables


def own_variables() -> "dict[str, str]":
    """Return the environment variables with which installers install here what is needed."""
    kept = {name: value for name, value in os.environ.items() if name not in DROPPED}
    return {**kept, **dict.fromkeys(OFF, "0")}


def is_on(value: str) -> bool:
    """Return whether installers take the value of a switch as on."""
    return value.lower() not in FALSE


def _refuse_hashes(name: str, value: str) -> None:
    refuse(f"{name}={value}, but the project's pins have no hashes; to install it: {name}=0")


def _about(folder: str = ".") -> dict:
    import tomllib

    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))


def _has_engine() -> bool:
    return (ROOT / ENGINE / "pyproject.toml").is_file()


def _folders() -> "list[str]":
    return [".", ENGINE] if _has_engine() else ["."]


def _dependencies() -> "list[str]":
    """Return what the project needs, and what its engine does."""
    return [
        each for folder in _folders() for each in _about(folder)["project"].get("dependencies", ())
    ]


def _wheels() -> "list[Path]":
    """Return the files that the project's requirements name."""
    named = filter(None, map(FILE.match, _dependencies()))
    return [Path(url2pathname(urlsplit(each[1]).path)) for each in named]


def _to_install_again() -> "list[str]":
    """Return requirements that installers may wrongly take as met.

    They know a wheel by name and version, and an engine whose source is gone was installed by path.
    """
    is_by_path = _has_engine()
    return [
        each
        for each in _dependencies()
        if FILE.match(each) or (each.startswith(ENGINE_NAME) and not is_by_path)
    ]


def _optional_requirements() -> "list[str]":
    tables = [_about(folder)["project"].get("optional-dependencies", {}) for folder in _folders()]
    return [each for table in tables for listed in table.values() for each in listed]


def optional_dependencies() -> "list[str]":
    """Return the names of the project's optional dependencies."""
    return list(_about()["project"].get("optional-dependencies", ()))


def requirements(group: str, about: dict) -> "list[str]":
    """Return the requirements of a dependency group, with the groups that it includes (PEP 735).

    This does not use `pip install --group`, which needs pip 25.1.

    Args:
        group: its name.
        about: the content of pyproject.toml.
    """
    project = re.escape(about["project"]["name"])
    listed = []
    for entry in about["dependency-groups"][group]:
        if isinstance(entry, dict):
            listed += requirements(entry["include-group"], about)
        else:
            listed.append(re.sub(rf"^{project}(?=\[)", ".", entry))
    return listed


def with_pins(project: str, pins: str) -> str:
    """Return the text of pyproject.toml with the pins of constraints.txt, which uv doesn't read."""
    listed = [f'    "{line}",' for line in pins.splitlines() if "==" in line]
    section = "\n".join(["constraint-dependencies = [", *listed, "]\n"])
    text, count = UV_PINS.subn(lambda _: section, project)
    assert count == 1, "pyproject.toml has no constraint-dependencies of [tool.uv]"
    return text


def limits(versions: str, listed: "list[str]") -> "list[str]":
    """Return the constraints that make an installer use the `oldest` or the `newest` versions.

    Args:
        versions: one of the two.
        listed: requirements of pyproject.toml.
    """
    lines = []
    for match in map(REQUIREMENT.fullmatch, listed):
        if match is None:
            continue
        name, lowest, marker = match.groups()
        if versions == "oldest":
            lines.append(f"{name}=={lowest}{marker or ''}")
        elif re.search("(a|b|rc)[0-9]", lowest):  # else prereleases are not allowed
            lines.append(f"{name}>={lowest}")
    return list(dict.fromkeys(lines))


def say(line: str) -> None:
    """Print a line to stderr; stdout belongs to the command."""
    sys.stderr.write(f"dev.py: {line}\n")


def refuse(line: str) -> None:
    """Print why this cannot be done, and exit with status 2."""
    say(line)
    sys.exit(2)
