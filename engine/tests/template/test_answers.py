"""The answers: invalid ones are rejected, and valid ones arrive unchanged."""

import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from cookiecutter.main import cookiecutter
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[3]
REFUSED = [
    ("package_name", "class", "keyword"),
    ("package_name", "lambda", "keyword"),
    ("package_name", "match", "keyword"),
    ("package_name", "type", "keyword"),
    ("package_name", "_", "keyword"),
    ("package_name", "print", "built-in"),
    ("package_name", "list", "built-in"),
    ("package_name", "json", "Python's own library"),
    ("package_name", "this", "Python's own library"),
    ("package_name", "torch", "dependency"),
    ("package_name", "yaml", "dependency"),
    ("package_name", "hydra_plugins", "dependency"),
    ("package_name", "lockstep", "dependency"),
    ("package_name", "test", "Python's own library"),
    ("package_name", "compression", "Python's own library"),
    ("package_name", "pip", "dependency"),
    ("package_name", "update", "script"),
    ("package_name", "dev", "script"),
    ("package_name", "tests", "folder"),
    ("package_name", "configs", "folder"),
    ("package_name", "7th", "starting with a letter"),
    ("package_name", "_private", "starting with a letter"),
    ("package_name", "my-gpt", "lowercase letters, digits, and _"),
    ("package_name", "MyGPT", "lowercase letters, digits, and _"),
    ("package_name", "größe", "lowercase letters, digits, and _"),
    ("package_name", "日本語", "lowercase letters, digits, and _"),
    ("package_name", "ｇｐｔ", "lowercase letters, digits, and _"),
    ("package_name", "my gpt", "lowercase letters, digits, and _"),
    ("package_name", "my.gpt", "lowercase letters, digits, and _"),
    ("package_name", "..", "lowercase letters, digits, and _"),
    ("package_name", "a/b", "lowercase letters, digits, and _"),
    ("package_name", "a\\b", "lowercase letters, digits, and _"),
    ("package_name", "x" * 25, "25 characters; 24 are allowed"),
    ("package_name", "con", "device on Windows"),
    ("package_name", "com1", "device on Windows"),
    ("package_name", "", "is empty"),
    ("package_name", " gpt", "spaces around it"),
    ("project_slug", "", "is empty"),
    ("project_slug", "my-gpt ", "spaces around it"),
    ("project_slug", "My-GPT", "lowercase letters, digits, and single dashes"),
    ("project_slug", "my_gpt", "lowercase letters, digits, and single dashes"),
    ("project_slug", "-my", "lowercase letters, digits, and single dashes"),
    ("project_slug", "my--gpt", "lowercase letters, digits, and single dashes"),
    ("project_slug", "../my-gpt", "lowercase letters, digits, and single dashes"),
    ("project_slug", "/tmp/my-gpt", "lowercase letters, digits, and single dashes"),
    ("project_slug", "x" * 25, "25 characters; 24 are allowed"),
    ("project_slug", "nul", "device on Windows"),
    ("project_slug", "lpt9", "device on Windows"),
    ("project_slug", "torchrun", "dependency or its command"),
    ("project_slug", "pytest", "dependency or its command"),
    ("project_slug", "git", "command of the system"),
    ("project_slug", "ls", "command of the system"),
    ("project_slug", "bash", "command of the system"),
    ("project_slug", "test", "command of the system"),
    ("project_name", "", "is empty"),
    ("project_name", "   ", "is empty"),
    ("project_name", "two\nlines", "one line"),
    ("project_name", "two\u2028lines", "one line"),
    ("description", "", "is empty"),
    ("description", "two\r\nlines", "one line"),
    ("description", "a bell \a", "control characters"),
    ("author", "", "is empty"),
    ("author", "a line's end\n", "one line"),
    ("author", "zero \0", "control characters"),
    ("author", "half a sign \ud83d", "control characters"),
    ("email", "nobody", "not an email address"),
    ("email", "Me <me@here.org>", "not an email address"),
    ("email", 'me@here.org", x="', "not an email address"),
    ("email", "me,@here.org", "not an email address"),
    ("email", "ü@here.org", "not an email address"),
    ("wandb_project", "", "is empty"),
    ("wandb_project", "a/b", "letters, digits and . _ -"),
    ("wandb_entity", "a: b", "letters, digits and . _ -"),
    ("wandb_project", "..", "a folder, not a name"),
    ("wandb_entity", ".", "a folder, not a name"),
    ("description", "template-only: begin", "a mark that the template reads"),
    ("author", "template-only: end", "a mark that the template reads"),
    ("description", "x <!-- template-only --> |", "a mark that the template reads"),
    ("project_name", "<!-- section of the living README: x -->", "a mark that the template reads"),
]
ODD_TEXTS = [
    'O\'Reilly "net"',
    "Größe Δ",
    "日本語",
    'ends with a quote "',
    "ends with a backslash \\",
    '""" \'\'\' `` \\n \\1 \\g<0> \\u0041 \\"',
    "emoji 🚀 👩‍🚀",
    "{{ 7 * 7 }} {% raw %} {# nothing #} {{ cookiecutter.author }}",
    "{{ cycler.__init__.__globals__.os.system('touch hurt') }} {% endraw %} {{",
    '"""); import os; os.system("touch hurt") #',
    "$(touch hurt) `touch hurt` ; touch hurt",
    '"]; dependencies = ["',
    "%s %(x)s {0} ${HOME} # <b>&amp; [a](b) - * :",
    "lockstep_gpt, a comma; and: a colon <x@y>",
]


def slip(folder: Path, **answers) -> Path:
    """Write cookiecutter's record of some answers, which it uses unchecked."""
    template = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))
    context = {name: "" for name in template if name.startswith("__")}
    context |= {**answers, "_extensions": template["_extensions"]}
    folder.mkdir(exist_ok=True)
    path = folder / "answers.json"
    path.write_text(json.dumps({"cookiecutter": context}))
    return path


@pytest.mark.parametrize(("name", "value", "rule"), REFUSED)
def test_rejected_in_one_line_before_files_are_written(name, value, rule, generate, tmp_path):
    with pytest.raises(SystemExit) as refusal:
        cookiecutter(
            generate.template,
            no_input=True,
            extra_context={name: value},
            output_dir=str(tmp_path / "out"),
            config_file=str(generate.config),
        )
    message = refusal.value.code
    assert re.fullmatch(
        rf"Error: {name}=.* .*{re.escape(rule)}.*", message
    )  # a dot isn't a line end
    assert message.isprintable()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"), [("package_name", "class"), ("project_slug", ""), ("author", "two\nlines")]
)
def test_the_command_prints_only_that_error_line(name, value, generate, template, tmp_path, git):
    done = generate(tmp_path / "out", f"{name}={value}", status=1)
    assert done.stdout == ""
    assert re.fullmatch(f"Error: {name}=.*\n", done.stderr)
    assert list(tmp_path.iterdir()) == []
    assert git(template, "status", "--porcelain") == ""


@pytest.mark.parametrize(("name", "value"), [("license", "GPL"), ("git_init", "maybe")])
def test_cookiecutter_s_own_choices_leave_no_files(name, value, generate, tmp_path):
    done = generate(tmp_path / "out", f"{name}={value}", status=1)
    assert re.search(rf"^ValueError: {value} provided for .*{name}", done.stderr, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_answers_of_a_replay_are_checked_too(generate, defaults, tmp_path):
    replay = slip(tmp_path / "replay", **{**defaults, "package_name": "class"})
    words = ["--replay-file", replay, "-o", tmp_path / "out"]
    done = generate.run("cookiecutter", generate.template, *words, cwd=tmp_path, status=1)
    assert re.fullmatch("Error: package_name='class' is a keyword of Python; .*\n", done.stderr)
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "replay"}
    assert not (tmp_path / "out" / "my-gpt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_text_is_shown_unchanged_and_not_executed(text, generate, defaults, tmp_path):
    texts = dict.fromkeys(("project_name", "description", "author"), text)
    answers = {**defaults, **texts, "email": "o'me+x@here.org"}
    replay = slip(tmp_path, **answers)
    cookiecutter(
        generate.template,
        replay=str(replay),
        output_dir=str(tmp_path),
        config_file=str(generate.config),
    )
    project = tmp_path / "my-gpt"
    about = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    assert about["description"] == text
    assert about["authors"] == [{"name": text, "email": "o'me+x@here.org"}]
    assert (project / "README.md").read_text("utf-8").startswith(f"# {text}\n\n{text}\n\n")
    owner = f"Copyright (c) {time.strftime('%Y')} {text}\n"
    assert owner in (project / "LICENSE").read_text("utf-8")
    assert not list(tmp_path.rglob("hurt"))


@pytest.mark.slow
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_text_is_metadata_that_a_wheel_can_have(text, made, tmp_path):
    project = made(tmp_path / "project", author=text, description=text, email="o'me+x@here.org")
    command = [sys.executable, "-m", "hatchling", "metadata"]
    done = subprocess.run(command, cwd=project, capture_output=True, check=True, encoding="utf-8")
    assert json.loads(done.stdout)["description"] == text


def test_typed_answers_are_kept_unchanged(generate, tmp_path):
    description, author = '{{ 7 * 7 }} "quoted"', "O'Reilly {% \\"
    typed = ["Größe Δ", "", "", description, author, "", "2", "", "team", "no"]
    options = [generate.template, "-o", tmp_path]
    typed_in = "".join(f"{line}\n" for line in typed)
    generate.run("cookiecutter", *options, cwd=tmp_path, typed=typed_in)
    about = tomllib.loads((tmp_path / "grosse-d/pyproject.toml").read_text("utf-8"))["project"]
    assert (about["name"], about["license"]) == ("grosse-d", "Apache-2.0")
    assert (about["description"], about["authors"]) == (description, [{"name": author}])


MISTAKES = {
    "project_name": "template-only: begin",
    "project_slug": "git",
    "package_name": "update",
    "description": "x <!-- template-only --> |",
    "author": "template-only: end",
    "email": "nobody",
    "wandb_project": "..",
    "wandb_entity": "a/b",
}


def test_a_rejected_answer_is_asked_again(generate, tmp_path):
    right = ["3D GPT", "", "", "A line", "", "", "3", "its-runs", "", "no"]
    again = {"project_slug": "its-slug", "package_name": "its_package", "author": "Its author"}
    typed = []
    questions = list(json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))["__prompts__"])
    for question, answer in zip(questions, right, strict=True):
        typed += [MISTAKES[question]] if question in MISTAKES else []
        typed.append(answer or again.get(question, ""))
    lines = "".join(f"{line}\n" for line in typed)
    options = [generate.template, "-o", tmp_path]
    done = generate.run("cookiecutter", *options, cwd=tmp_path, typed=lines)
    names = re.findall(r"(\w+)='.*' ", done.stdout)
    assert names == list(MISTAKES)
    record = json.loads((tmp_path / "its-slug/.template.json").read_text("utf-8"))
    assert record["answers"] == {
        "project_name": "3D GPT",
        "project_slug": "its-slug",
        "package_name": "its_package",
        "description": "A line",
        "author": "Its author",
        "email": "",
        "license": "BSD-3-Clause",
        "wandb_project": "its-runs",
        "wandb_entity": "",
        "git_init": False,
    }


def test_questions_that_end_in_a_mistake_leave_nothing(generate, tmp_path):
    options = [generate.template, "-o", tmp_path / "out"]
    typed = "My GPT\ngit\n"
    done = generate.run("cookiecutter", *options, cwd=tmp_path, typed=typed, status=1)
    assert done.stderr == "Error: project_slug has no valid answer\n"
    assert list(tmp_path.iterdir()) == []


NAMES = ["3D GPT", "12345", "1e3", "🚀", "~", "git", "torch", "class", "test", "update", "con"]
NAMES += ["A rather long name of a project that goes on and on", "x" * 60, "none", "Große Ω"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_defaults_of_any_name_are_taken(name, generate, tmp_path):
    generate(tmp_path, "git_init=no", f"project_name={name}")
    (project,) = tmp_path.iterdir()
    about = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    assert about["name"] == project.name


@given(st.text(st.characters(categories=("Ll", "Nd"), max_codepoint=127) | st.just("-")))
def test_suggested_names_are_taken_and_cut_between_words(words):
    from hooks.answers import check, suggested_package, suggested_slug

    slug = suggested_slug(words.strip("-"))
    assert check("project_slug", slug) == slug
    package = suggested_package(slug)
    assert check("package_name", package) == package


def test_a_long_name_is_cut_between_words():
    from hooks.answers import suggested_package, suggested_slug

    assert suggested_slug("a-transformer-of-many-layers") == "a-transformer-of-many"
    assert suggested_slug("x" * 30) == "x" * 24
    assert suggested_package("3-transformers-of-layers") == "my_3_transformers_of"


def test_jinja_of_the_command_line_is_run_by_cookiecutter_and_never_again(generate, tmp_path):
    generate(tmp_path, "git_init=no", "description={{ '{{ 7 * 7 }}' }}")
    about = tomllib.loads((tmp_path / "my-gpt/pyproject.toml").read_text("utf-8"))["project"]
    assert about["description"] == "{{ 7 * 7 }}"
    assert "\n\n{{ 7 * 7 }}\n\n" in (tmp_path / "my-gpt/README.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("name", "slug"),
    [('O\'Reilly "net"', "o-reilly-net"), ("Größe Δ", "grosse-d"), ("日本語", "ri-ben-yu")],
)
def test_a_project_of_any_name_has_a_folder_a_command_and_a_package(name, slug, generate, tmp_path):
    generate(tmp_path, "git_init=no", f"project_name={name}")
    about = tomllib.loads((tmp_path / slug / "pyproject.toml").read_text("utf-8"))["project"]
    package = slug.replace("-", "_")
    assert about["scripts"] == {slug: f"{package}.__main__:run"}
    assert (tmp_path / slug / "src" / package / "__main__.py").is_file()


def test_every_question_has_a_prompt_of_one_short_line():
    questions = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))
    prompts = questions["__prompts__"]
    assert set(prompts) == {name for name in questions if not name.startswith("_")}
    for prompt in prompts.values():
        assert prompt.isprintable()
        assert len(f"  [10/10] {prompt}") < 80
