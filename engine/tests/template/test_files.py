"""The files of a new project: which files there are, and what they contain."""

import json
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from fnmatch import fnmatchcase

import pytest
import yaml
from hooks.answers import EXTRAS, LICENSES, places
from hooks.contents import MARKED
from markdown_it import MarkdownIt

CHOICES = ["none", *EXTRAS, "all"]
# Parts of the living root that projects don't get; a name that ends with a slash is a folder.
OURS = (
    ".ci/",
    ".github/ISSUE_TEMPLATE/",
    ".github/workflows/projects.yml",
    "BENCHMARKS.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "cookiecutter.json",
    "docs/coming_from.md",
    "docs/first_run.png",
    "docs/lockstep.png",
    "hooks/",
    "lab/",
    "scripts/deletions.py",
    "tests/extras/pages/test_inductor.py",
    "tests/gpu_without_gpu/test_compiled_variants.py",
    "tests/lab/",
    "tests/model/test_against_transformers.py",
    "tests/scripts/test_dev.py",
    "tests/scripts/test_environments.py",
    "tests/scripts/test_slurm.py",
    "tests/template/",
    "tests/test_nodes.py",
    "{{cookiecutter.project_slug}}/",
)
AT_THE_ROOT = {
    ".devcontainer/devcontainer.json",
    ".editorconfig",
    ".env.example",
    ".gitattributes",
    ".github/dependabot.yml",
    ".github/workflows/ci.yml",
    ".gitignore",
    ".pre-commit-config.yaml",
    ".python-version",
    ".template.json",
    "AGENTS.md",
    "Dockerfile",
    "LICENSE",
    "README.md",
    "constraints.txt",
    "docs/README.md",
    "docs/devices.md",
    "docs/extend.md",
    "docs/extras.md",
    "docs/house.md",
    "docs/jobs.md",
    "docs/lightning.md",
    "docs/own_data.md",
    "docs/resume.md",
    "docs/sums.png",
    "docs/tracking.md",
    "docs/troubleshooting.md",
    "docs/tutorial.md",
    "pyproject.toml",
    "scripts/dev.py",
    "scripts/environments.py",
    "scripts/pins.py",
    "scripts/update.py",
}


def text_of(content: bytes) -> str:
    """Return the text of a file; pictures have none."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return ""


def in_places(name: str, extras: Iterable[str]) -> bool:
    """Return whether a project's file belongs to one of these extras."""
    patterns = [pattern for extra in extras for pattern in places(extra)]
    return any(fnmatchcase(name.replace("my_gpt", "lockstep_gpt"), pattern) for pattern in patterns)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", CHOICES)
def test_generated_files_are_git_s_without_the_template_s(chosen, baked, template, git, tree):
    wanted = EXTRAS if chosen == "all" else {chosen}
    absent = {*EXTRAS} - {*wanted}
    names = git(template, "ls-files", "-z").rstrip("\0").split("\0")
    expected = {name for name in names if not name.startswith(OURS) and not in_places(name, absent)}
    files = set(tree(baked(extras=chosen)))
    expected = {name.replace("lockstep_gpt", "my_gpt") for name in expected}
    assert files == {*expected, ".template.json"}


def test_without_extras_the_root_has_no_other_files(baked, tree):
    folders = (
        "configs/",
        "scripts/kubernetes/",
        "scripts/sky/",
        "scripts/slurm/",
        "src/",
        "tests/",
    )
    files = {name for name in tree(baked(extras="none")) if not name.startswith(folders)}
    assert files == AT_THE_ROOT


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_adds_its_own_files_and_no_other(extra, baked, tree):
    added = set(tree(baked(extras=extra))) - set(tree(baked(extras="none")))
    assert all(in_places(name, [extra]) for name in added)
    assert f"src/my_gpt/extras/{extra}/__init__.py" in added


@pytest.mark.parametrize("chosen", CHOICES)
def test_nothing_is_left_of_our_names_or_of_the_mechanism(chosen, baked, tree, template):
    # `lockstep` is the name of the engine, in projects, too.
    name_of_ours = r"lockstep[-_ ]?gpt"
    ours = rf"{name_of_ours}|cookiecutter\.|template-only|extra \w+(: (begin|end)| -->)|\{{%"
    for name, (_, content) in tree(baked(extras=chosen)).items():
        text = text_of(content).replace(str(template), "")  # the project's origin
        assert not re.search(ours, f"{name}\n{text}", re.IGNORECASE), name
        if not name.endswith(".py"):  # f-strings use them, and GitHub does after a dollar
            assert not re.search(r"(?<!\$)\{\{", text), name


def test_markers_in_the_sources_are_pairs_with_existing_names(template):
    marker = re.compile(r"(template-only|extra (\w+)): (begin|end)$")
    for name in MARKED:
        text = (template / name).read_text("utf-8")
        lines = (line.strip("#<!-> ") for line in text.splitlines())
        markers = [match for line in lines if (match := marker.fullmatch(line))]
        assert [match[3] for match in markers] == ["begin", "end"] * (len(markers) // 2), name
        assert [match[1] for match in markers[::2]] == [match[1] for match in markers[1::2]], name
        assert {match[2] for match in markers} <= {None, *EXTRAS}, name
        for line in text.splitlines():
            if row := re.search(r"<!-- (template-only|extra (\w+)) -->", line):
                assert row[2] in {None, *EXTRAS}, f"{name}: {line}"
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
    assert about["scripts"] == {"its-slug": "its_package.cli:run"}


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


@pytest.mark.slow
@pytest.mark.parametrize("answers", [{"license": "none"}, {"extras": "none"}, {"extras": "all"}])
def test_its_tests_of_packaging_pass_for_all_choices(answers, baked, environment, python_of_forks):
    project = baked(**answers)
    tests = ["tests/test_packaging.py"]
    options = ["-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    done = subprocess.run(
        [python_of_forks, "-m", "pytest", *options, *tests],
        cwd=project,
        env=environment(PYTHONPATH="src", PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1"),
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("words", "ending"),
    [
        (["train", "callbacks=[default,documents]"], "is not one of default, replays, trace"),
        (["train", "packing=documents"], "is not one of stream"),
        (["plan"], "python3 scripts/dev.py update --add cluster"),
        (["export", "runs/one"], "python3 scripts/dev.py update --add hub"),
    ],
)
def test_what_needs_a_missing_extra_is_rejected_in_one_line(words, ending, baked, environment):
    done = subprocess.run(
        [sys.executable, "-m", "my_gpt", *words],
        cwd=baked(extras="none"),
        env=environment(PYTHONPATH="src", PYTHONDONTWRITEBYTECODE="1"),
        capture_output=True,
        encoding="utf-8",
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert done.stderr.endswith(f"{ending}\n")


def test_a_project_has_the_commands_of_its_extras_only(baked, environment):
    listed = {}
    for extras in ("none", "all"):
        done = subprocess.run(
            [sys.executable, "-m", "my_gpt", "--help"],
            cwd=baked(extras=extras),
            env=environment(PYTHONPATH="src", PYTHONDONTWRITEBYTECODE="1"),
            check=True,
            capture_output=True,
            encoding="utf-8",
        )
        listed[extras] = re.findall(r"^  (\w+) ", done.stdout, re.MULTILINE)
    assert listed["none"] == ["train", "prepare", "evaluate", "generate", "check"]
    assert {"export", "plan", "compare", "report"} < {*listed["all"]}


def test_every_readme_says_how_to_add_each_extra(baked):
    for chosen in ("none", "all"):
        readme = (baked(extras=chosen) / "README.md").read_text("utf-8")
        for extra, description in EXTRAS.items():
            command = f"python3 scripts/dev.py update --add {extra}"
            assert f"| `{extra}` | {description} | `{command}` |" in readme


# Composes commands one after another; prints their exit statuses.
COMPOSE = """
import json, sys
from my_gpt import cli
statuses = [cli.main(words) for words in json.loads(sys.argv[1])]
print("=", *statuses)
"""


@pytest.mark.slow
@pytest.mark.parametrize("extras", ["none", "all"])
def test_a_new_readme_has_only_commands_that_the_project_understands(
    extras, baked, environment, python_of_forks
):
    project = baked(extras=extras)
    readme = (project / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    assert {line.split()[0] for line in lines} <= {"my-gpt", "python3", "torchrun"}
    # Neither a sweep nor a resume composes alone; of both, tests run the living README's.
    alone = re.compile(r"(my-gpt|.* my_gpt) train (?!.*(resume=|--multirun))")
    trains = [line for line in lines if alone.match(line)]
    words = [[*shlex.split(line[line.index("train") :]), "--cfg", "job"] for line in trains]
    assert len(words) > 5
    done = subprocess.run(
        [python_of_forks, "-c", COMPOSE, json.dumps(words)],
        cwd=project,
        env=environment(PYTHONPATH="src", PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1"),
        capture_output=True,
        encoding="utf-8",
    )
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
    project = baked(extras="all")
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
    files = tree(baked(extras="all"))
    runnable = {name for name, (may_run, _) in files.items() if may_run}
    assert runnable == {name for name, (_, text) in files.items() if text.startswith(b"#!")}
    assert "scripts/dev.py" in runnable


def test_a_project_without_extras_has_a_short_readme_and_few_dependencies(baked):
    project = baked(extras="none")
    assert (project / "README.md").read_text("utf-8").count("\n") <= 170
    about = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    assert len(about["dependencies"]) <= 13
