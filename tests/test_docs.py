"""The pages for people: links lead somewhere, files and flags exist, and the parts made from code are up to date."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.generated_docs import BLOCKS, ROOT, marked, pages, parser_of, written

PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "ops").rglob("*.md")))
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
PATH = re.compile(r"`((?:minisgl\.py|(?:pipeline|stages|web|ops|docker|tests|docs)/)[^`\s]*)`")
COMMAND = re.compile(
    r"(?:\bminisgl|make (?=serve)) ?(serve|(?:stage|dead|keys|replay|bench) \w+|trace|top|shell)\b([^#|`\n]*)",
)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def links_of(page: Path) -> Iterator[str]:
    """Yield the relative links of *page*."""
    for target in LINK.findall(CODE.sub("", page.read_text())):
        if "://" not in target:
            yield target


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of the headings of *page*, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in links_of(page):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors_of(linked), target


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_what_is_made_from_code_is_up_to_date(page: Path) -> None:
    assert written(page.read_text()) == page.read_text(), "run: make docs"


def test_everything_that_is_made_from_code_is_on_a_page() -> None:
    texts = [page.read_text() for page in pages()]
    assert {name for name in BLOCKS if any(marked(name).search(text) for text in texts)} == set(BLOCKS)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_file_that_is_named_exists(page: Path) -> None:
    for path in PATH.findall(page.read_text()):
        wildcards = re.sub(r"<\w+>", "*", path)  # `<name>.lua` stands for any
        assert any(ROOT.glob(wildcards.rstrip("/"))), path


def test_every_file_of_the_tree_exists() -> None:
    tree = next(block for block in CODE.findall((ROOT / "docs/architecture.md").read_text()) if "minisgl.py  " in block)
    folders = {-1: ROOT}
    for line in filter(str.strip, tree.splitlines()):
        indent = len(line) - len(line.lstrip())
        if re.match(r" *\w+/", line) and indent <= 4:  # a folder and what is in it
            folders = {at: folder for at, folder in folders.items() if at < indent}
            folders[indent] = folders[max(folders)] / line.split()[0]
            assert folders[indent].is_dir(), line
        elif indent <= 4:  # files beside the folders of this indent
            folders = {at: folder for at, folder in folders.items() if at < indent}
        for name in re.findall(r"(?<![\w/])[\w*][\w/*]*(?:\.\w+|/)(?!\w)", line):
            assert any(folders[max(folders)].glob(name)) or (folders[max(folders)].parent / name).exists(), name


def test_every_flag_of_a_command_exists() -> None:
    seen = set()
    for page in PAGES:
        for command, rest in COMMAND.findall(page.read_text()):
            used = set(FLAG.findall(rest))
            options = set(parser_of(command)._option_string_actions) if used else set()
            assert used <= options, f"{page.name}: {command}{rest}"
            seen |= {command} if used else set()
    assert {"serve", "stage tokenize", "shell", "bench serve"} <= seen
