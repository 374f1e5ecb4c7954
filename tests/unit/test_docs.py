"""What the documentation says is checked against the code."""

import ast
import re
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from farandole.cli import app
from farandole.config import NUMERICS, JobConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MARK = "<!-- table: kept in step with farandole.config by tests/unit/test_docs.py -->\n"


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def rows(model: type[BaseModel], prefix: str = "") -> list[str]:
    lines = []
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            lines += rows(kind, f"{name}.")
            continue
        default = info.get_default(call_default_factory=True)
        shown = "none" if default is None else f"`{default}`"
        shown = "required" if info.is_required() else shown
        text = (info.description or "").replace(" (numerics)", "")
        numerics = " *numerics*" if prefix + name in NUMERICS else ""
        lines.append(f"| `{prefix}{name}` | {shown} | {text}{numerics} |")
    return lines


def test_configuration_page_lists_every_key():
    page = (ROOT / "docs/guide/configuration.md").read_text()
    table = "\n".join(["| key | default | meaning |", "|---|---|---|", *rows(JobConfig)]) + "\n"
    assert page.partition(MARK)[2].strip() == table.strip()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_examples_parse(page):
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        ast.parse(code)


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(pages)


def test_diff_turns_one_loop_into_another():
    """Both sides of the diff are Python, and only the new one needs Farandole."""
    page = (ROOT / "docs/guide/from-a-loop.md").read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", page, flags=re.DOTALL)
    lines = diff.splitlines()
    before, after = ("\n".join(x[1:] for x in lines if not x.startswith(sign)) for sign in "+-")
    ast.parse(before)
    ast.parse(after)
    assert "fa." not in before
    assert "loss.backward()" not in after


def commands() -> list[str]:
    """Return every `farandole` command line in the pages and the quickstart's last words."""
    text = "\n".join(page.read_text() for page in PAGES)
    blocks = re.findall(r"```\n(.*?)```", text, flags=re.DOTALL)
    quickstart = (ROOT / "examples/flights/quickstart.py").read_text()
    lines = "\n".join([*blocks, quickstart.replace(".venv/bin/", "")]).splitlines()
    lines = [line.strip().partition(" #")[0] for line in lines]
    return sorted({line for line in lines if line.startswith("farandole ")})


@pytest.mark.parametrize("line", commands())
def test_commands_have_the_options_that_pages_give_them(line):
    group = typer.main.get_command(app)
    arguments = line.split()[1:]
    while hasattr(group, "commands"):
        name, *arguments = arguments
        assert name in group.commands
        group = group.commands[name]
    known = {option for p in group.params for option in [*p.opts, *p.secondary_opts]}
    for option in (argument for argument in arguments if argument.startswith("-")):
        assert option in known


def test_every_command_is_told_of():
    names = {line.split()[1] for line in commands()}
    text = "\n".join(page.read_text() for page in PAGES)
    for name in typer.main.get_command(app).commands:
        assert name in names or f"`farandole {name}" in text, name
