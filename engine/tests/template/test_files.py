"""The files of a new project: which files there are, and what they contain."""

import json
import re
import shlex
import subprocess
import sys
import time
import tomllib

import pytest
import yaml
from hooks.answers import LICENSES
from hooks.contents import MARKED
from hooks.project import TEMPLATE_ONLY
from markdown_it import MarkdownIt

MOST = 80  # files of a project's own
AT_THE_ROOT = {
    ".devcontainer/devcontainer.json",
    ".gitattributes",
    ".github/dependabot.yml",
    ".github/workflows/ci.yml",
    ".gitignore",
    ".pre-commit-config.yaml",
    ".template.json",
    "AGENTS.md",
    "Dockerfile",
    "LICENSE",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
    "scripts/dev.py",
    "scripts/environments.py",
    "scripts/update.py",
}


def text_of(content: bytes) -> str:
    """Return the text of a file; pictures have none."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return ""


def test_generated_files_are_git_s_without_the_template_s(baked, template, git, tree):
    names = git(template, "ls-files", "-z").rstrip("\0").split("\0")
    assert [
        each for each in TEMPLATE_ONLY if not any(name.startswith(each) for name in names)
    ] == []
    expected = {name for name in names if not name.startswith(TEMPLATE_ONLY)}
    expected |= {"LICENSE", "README.md", ".template.json"}
    files = set(tree(baked()))
    assert files == {name.replace("lockstep_gpt", "my_gpt") for name in expected}


def test_the_root_has_no_other_files(baked, tree):
    folders = (
        "configs/",
        "docs/",
        "engine/",
        "scripts/kubernetes/",
        "scripts/sky/",
        "scripts/slurm/",
        "src/",
        "tests/",
    )
    files = {name for name in tree(baked()) if not name.startswith(folders)}
    assert files == AT_THE_ROOT


def test_the_engine_is_the_template_s_without_its_tests(made, template, tree, tmp_path):
    """Whatever the names are: `lockstep` may be a part of them, or the other way around."""
    ours = {
        name: content
        for name, content in tree(template).items()
        if name.startswith("engine/") and not name.startswith("engine/tests/")
    }
    assert {"engine/LICENSE", "engine/src/lockstep/py.typed"} < set(ours)
    for package in ("my_gpt", "lockstep_gpt", "lock", "lockstep_gpt_2", "launch"):
        slug = package.replace("_", "-")
        project = made(tmp_path / package, package_name=package, project_slug=slug)
        files = tree(project)
        assert {name: files[name] for name in files if name.startswith("engine/")} == ours


def test_nothing_is_left_of_our_names_or_of_the_mechanism(baked, tree, template):
    # `lockstep` is the name of the engine, in projects, too.
    ours = r"lockstep[-_ ]?gpt|cookiecutter\.|template-only|\{%"
    for name, (_, content) in tree(baked()).items():
        text = text_of(content).replace(str(template), "")  # the project's origin
        assert not re.search(ours, f"{name}\n{text}", re.IGNORECASE), name
        if not name.endswith(".py"):  # f-strings use them, and GitHub does after a dollar
            assert not re.search(r"(?<!\$)\{\{", text), name


def test_markers_in_the_sources_are_pairs_with_existing_names(template):
    marker = re.compile(r"template-only: (begin|end)$")
    for name in MARKED:
        text = (template / name).read_text("utf-8")
        lines = (line.strip("#<!-> ") for line in text.splitlines())
        markers = [match for line in lines if (match := marker.fullmatch(line))]
        assert [match[1] for match in markers] == ["begin", "end"] * (len(markers) // 2), name
        for line in text.splitlines():
            if row := re.search(r"<!-- template-only -->", line):
                assert line.endswith(f" {row[0]} |"), f"{name}: {line}"


def test_every_table_is_shown_whole(template, tree):
    rows = re.compile(r"\|.*\|")
    for name, (_, content) in tree(template).items():
        if name.endswith(".md"):
            html = MarkdownIt("gfm-like", {"linkify": False}).render(text_of(content))
            paragraphs = re.findall(r"<p>(.*?)</p>", html, flags=re.DOTALL)
            assert not [paragraph for paragraph in paragraphs if rows.match(paragraph)], name


def test_pyproject_has_the_answers(baked):
    project = baked(
        project_slug="its-slug",
        package_name="its_package",
        description="A sentence",
        author="Ada L.",
        email="ada@here.org",
        license="BSD-3-Clause",
    )
    about = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    assert about["name"] == "its-slug"
    assert about["description"] == "A sentence"
    assert about["authors"] == [{"name": "Ada L.", "email": "ada@here.org"}]
    assert (about["license"], about["license-files"]) == ("BSD-3-Clause", ["LICENSE"])
    assert about["scripts"] == {"its-slug": "its_package.__main__:run"}


@pytest.mark.parametrize("name", [name for name in LICENSES if name != "none"])
def test_license_has_year_and_author_and_no_gap_to_fill(name, baked):
    project = baked(license=name, author="Ada Lovelace")
    text = (project / "LICENSE").read_text("utf-8")
    assert text.count(f"{time.strftime('%Y')} Ada Lovelace") == 1
    assert name.split("-")[0] in text or "Redistribution and use" in text
    assert not re.search(r"lockstep|\[yyyy\]|\[name|<year>|<owner>", text, re.IGNORECASE)
    readme = (project / "README.md").read_text("utf-8")
    assert readme.endswith(f"\n\n## License\n\n{name}, see [LICENSE](LICENSE).\n")


def test_without_a_license_none_is_mentioned(baked):
    project = baked(license="none")
    about = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    assert not (project / "LICENSE").exists()
    assert {"license", "license-files"} & set(about) == set()
    assert "licen" not in (project / "README.md").read_text("utf-8").lower()


@pytest.fixture
def of_project(environment):
    """Return a function that runs Python on a project's code and its engine's."""

    def run(project, *words):
        return subprocess.run(
            words,
            cwd=project,
            env=environment(
                PYTHONPATH="src:engine/src", PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1"
            ),
            capture_output=True,
            encoding="utf-8",
        )

    return run


def test_a_project_has_its_own_commands_and_the_engine_s(baked, of_project):
    done = of_project(baked(), sys.executable, "-m", "my_gpt", "--help")
    assert re.findall(r"^  (\w+) ", done.stdout, re.MULTILINE) == [
        "train",
        "prepare",
        "evaluate",
        "generate",
        "export",
        "check",
        "plan",
        "doctor",
        "drill",
        "compare",
        "verify",
        "panel",
        "report",
    ]


# Composes commands one after another; prints their exit statuses.
COMPOSE = """
import json, sys
import my_gpt
from lockstep.commands import main
statuses = [main(words) for words in json.loads(sys.argv[1])]
print("=", *statuses)
"""


@pytest.mark.slow
def test_a_new_readme_has_only_commands_that_the_project_understands(
    baked, of_project, python_of_forks
):
    project = baked()
    readme = (project / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    assert {line.split()[0] for line in lines} <= {"my-gpt", "python3", "torchrun"}
    # Neither a sweep nor a resume composes alone; of both, tests run the living README's.
    alone = re.compile(r"(my-gpt|.* my_gpt) train (?!.*(resume=|--multirun))")
    trains = [line for line in lines if alone.match(line)]
    words = [[*shlex.split(line[line.index("train") :]), "--cfg", "job"] for line in trains]
    assert len(words) > 5
    done = of_project(project, python_of_forks, "-c", COMPOSE, json.dumps(words))
    assert done.stdout.splitlines()[-1] == " ".join(["=", *["0"] * len(words)]), done.stderr


@pytest.mark.parametrize(("entity", "value"), [("", None), ("its-team", "its-team")])
def test_wandb_s_project_and_team_are_in_the_logger_s_settings(entity, value, baked):
    project = baked(wandb_project="its-wandb", wandb_entity=entity)
    settings = yaml.safe_load((project / "configs/logger/wandb.yaml").read_text("utf-8"))
    assert (settings["wandb"]["project"], settings["wandb"]["entity"]) == ("its-wandb", value)
    sweep = yaml.safe_load((project / "configs/sweep.yaml").read_text("utf-8"))
    assert sweep["project"] == "its-wandb"


@pytest.mark.parametrize("slug", ["null", "on", "1e3", "123", "0x1f", "1-2"])
def test_a_slug_that_yaml_would_convert_stays_text(slug, made, tmp_path):
    project = made(tmp_path / slug, project_slug=slug, wandb_project=slug, wandb_entity=slug)
    logger = yaml.safe_load((project / "configs/logger/wandb.yaml").read_text("utf-8"))["wandb"]
    sweep = yaml.safe_load((project / "configs/sweep.yaml").read_text("utf-8"))
    assert [logger["project"], logger["entity"], sweep["project"]] == [slug] * 3
    assert slug in sweep["command"]
    about = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    assert (about["name"], list(about["scripts"])) == (slug, [slug])


def test_git_ignores_what_a_run_writes_and_no_file_of_a_project(baked, tree, tmp_path):
    project = baked()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_bytes((project / ".gitignore").read_bytes())
    runs = ["data/stdlib-1/index.json", "runs/one/train.log", "wandb/run", "mlflow.db"]
    written = [folder + path for folder in ("", "src/") for path in runs]
    paths = "\n".join([*tree(project), *written])
    git = ["git", "-c", "core.excludesFile=/dev/null", "-C", str(tmp_path)]
    ignored = subprocess.run(
        [*git, "check-ignore", "--stdin"], input=paths, capture_output=True, encoding="utf-8"
    )
    assert ignored.stdout.splitlines() == written


def test_exactly_the_files_with_a_shebang_are_executable(baked, tree):
    files = tree(baked())
    runnable = {name for name, (may_run, _) in files.items() if may_run}
    assert runnable == {name for name, (_, text) in files.items() if text.startswith(b"#!")}
    assert "scripts/dev.py" in runnable


def test_a_project_has_few_files_a_short_readme_and_few_dependencies(baked, tree):
    project = baked()
    own = [name for name in tree(project) if not name.startswith("engine/")]
    assert len(own) <= MOST, sorted(own)
    assert (project / "README.md").read_text("utf-8").count("\n") <= 170
    about = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    assert len(about["dependencies"]) <= 13
