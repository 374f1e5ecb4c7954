"""What the documentation says is checked against the code."""

import ast
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

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
        if info.is_required():
            shown = "required"
        else:
            shown = "none" if default is None else f"`{default}`"
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
