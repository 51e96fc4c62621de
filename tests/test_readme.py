"""README.md says what is so: its table, its commands, its example, its links, its extras."""

from __future__ import annotations

import configparser
import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from cuflash import cli, support

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines()]


def extras() -> dict[str, str]:
    config = configparser.ConfigParser(inline_comment_prefixes=None)
    config.read(ROOT / "setup.cfg")
    return dict(config["options.extras_require"])


def test_support_table_is_what_the_backends_answer():
    shown = re.search(r"^<!-- support table: .*? -->\n(.*?)\n?<!-- end of support table -->$", README, re.MULTILINE | re.DOTALL)
    assert shown, "README.md has lost the markers around its support table"
    assert shown[1].splitlines() == support.table().splitlines(), (
        "run `python -m cuflash support` and put its output into README.md"
    )


def test_usage_example_prints_what_its_comment_says():
    (example,) = blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {})
    promised = re.search(r"^print\(out.*?\)  # (.*)$", example, re.MULTILINE)[1]
    assert printed.getvalue().splitlines()[0] == promised
    assert "kernel" in printed.getvalue()


def test_two_commands_set_everything_up():
    setups = [line for line in commands() if "venv .venv" in line]
    assert len(setups) == 2
    for line, last in zip(
        setups,
        (["examples/smollm2_chat.py", "What is the capital of France?"], ["-m", "pytest", "-n", "2", "--dist", "loadfile"]),
        strict=True,
    ):
        create, install, run = line.split(" && ")
        assert create == "python3 -m venv .venv"
        program, *arguments, requirement = shlex.split(install)
        assert (program, arguments) == (".venv/bin/pip", ["install", "-e"])
        assert set(re.fullmatch(r"\.\[(.*)\]", requirement)[1].split(",")) <= extras().keys()
        assert shlex.split(run) == [".venv/bin/python", *last]


def test_ci_runs_the_test_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    pattern = re.search(r"^command=\$\(grep -E '(.*)' README\.md\)$", script, re.MULTILINE)[1]
    found = [line for line in README.splitlines() if re.search(pattern, line)]
    assert found == [line for line in commands() if " -m pytest" in line]
    assert re.search(r'^eval "\$\{command//\.venv/', script, re.MULTILINE)


@pytest.mark.parametrize("line", [line for line in commands() if " -m cuflash " in line])
def test_command_line_examples_run(line, capsys):
    arguments = shlex.split(line)
    assert cli.main(arguments[arguments.index("cuflash") + 1 :]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)|(?<![\w/.])(examples/\w+\.py)", README))), ids="".join)
def test_files_that_it_names_exist(path):
    assert (ROOT / "".join(path)).is_file()


def test_every_extra_is_explained_and_exists():
    table = README.split("## Which extra to install")[1].split("## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall(r"`([\w-]+)`", row)) == sorted(extras())


def test_lowest_cupy_is_the_one_that_pip_enforces():
    stated = re.search(r"The lowest CuPy is (\d+\.\d+)\.", README)[1]
    assert re.findall(r"^cupy-cuda\d+x>=(.*)$", "\n".join((extras()["cuda12"], extras()["cuda13"])), re.MULTILINE) == [stated] * 2


def test_public_functions_that_it_names_exist():
    import cuflash

    for name in re.findall(r"`(?:cuflash\.)?(\w+)`", README.split("## What else there is")[1].split("## ")[0]):
        assert name == "ml_dtypes" or hasattr(cuflash, name), name
