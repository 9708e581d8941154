"""The files of the pages: small, whole, with nothing that their policy refuses or that parses markup."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from web.http.page_files import PAGES

MOST_BYTES = 300 * 1024
OTHER = "docs.html"
"""A page of its own, older than the others: its script is inline, and its policy has the hash of it."""
FILES = sorted(path for path in PAGES.rglob("*") if path.is_file() and path.name != OTHER)
VENDOR = PAGES / "vendor"
OURS = [path for path in FILES if path.suffix == ".js" and path.parent != VENDOR]
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|setHTML|srcdoc"
    r"|\beval\(|new Function|\.setAttribute\(\s*[\"']style"
)
IMPORT = re.compile(r"""(?:^|\n)\s*(?:import|export)\b[^;]*?from\s*["']([^"']+)["']""")


def name_of(path: Path) -> str:
    return path.relative_to(PAGES).as_posix()


def test_all_files_together_are_small() -> None:
    assert sum(path.stat().st_size for path in FILES) <= MOST_BYTES


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_no_script_parses_markup_or_text_as_a_program(path: Path) -> None:
    source = path.read_text()
    if path.name == "dom.js":
        source = source.replace('const FORBIDDEN = new Set(["innerHTML", "outerHTML", "style", "srcdoc"]);', "")
    assert not MARKUP.findall(source)


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_every_import_is_a_file_of_the_pages(path: Path) -> None:
    for target in IMPORT.findall(path.read_text()):
        found = (path.parent / target).resolve()
        assert found.is_file() and found.is_relative_to(PAGES), target


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".html"], ids=name_of)
def test_a_page_has_nothing_inline_and_only_files_that_exist(path: Path) -> None:
    source = path.read_text()
    assert not re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|javascript:", source)
    links = re.findall(r'(?:src|href)="([^"]+)"', source)
    assert links and all(link.startswith("/") for link in links)
    assert not [link for link in links if link.startswith("/pages/") and not (PAGES / link[len("/pages/") :]).is_file()]


def test_every_file_of_others_has_its_version_and_its_licence() -> None:
    for path in VENDOR.glob("*.*s"):
        library, version = re.fullmatch(r"(.+?)-(\d+\.\d+\.\d+)(?:\.\w+)*\.\w+", path.name).groups()  # type: ignore[union-attr]
        assert version in path.read_text()[:1000] and list(VENDOR.glob(f"{library}-LICENSE*")), path.name
