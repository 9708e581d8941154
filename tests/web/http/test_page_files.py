"""The files of the pages: which are read, what a browser is told about them, and what it may do with them."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from web.http.page_files import POLICY, policy_of, read_page, read_pages


@pytest.mark.parametrize(
    ("name", "content_type"),
    [
        ("a.html", "text/html; charset=utf-8"),
        ("a.CSS", "text/css; charset=utf-8"),
        ("parts/a.js", "text/javascript; charset=utf-8"),
        ("vendor/deep/a.mjs", "text/javascript; charset=utf-8"),
        ("a.svg", "image/svg+xml"),
        ("a.woff2", "font/woff2"),
        ("vendor/LICENSE", "text/plain; charset=utf-8"),
        ("a.exe", "text/plain; charset=utf-8"),
    ],
)
def test_a_file_has_the_type_of_its_ending_and_no_browser_guesses_another(
    tmp_path: Path, name: str, content_type: str
) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"<script>")
    (found,) = read_pages(tmp_path).values()
    assert (found.content, found.content_type) == (b"<script>", content_type)
    assert found.headers["X-Content-Type-Options"] == "nosniff" and found.headers["Referrer-Policy"] == "no-referrer"


def test_hidden_files_and_links_that_lead_out_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    (folder / ".git").mkdir(parents=True)
    for path in (tmp_path / "secret.js", folder / ".env", folder / ".git" / "a.js", folder / "a.js"):
        path.write_text("x")
    (folder / "out.js").symlink_to(tmp_path / "secret.js")
    (folder / "in.js").symlink_to(folder / "a.js")
    assert set(read_pages(folder)) == {"a.js", "in.js"}


def test_other_content_has_another_tag(tmp_path: Path) -> None:
    for name, content in (("a.js", "1"), ("b.js", "1"), ("c.js", "2")):
        (tmp_path / name).write_text(content)
    tags = {name: file.headers["ETag"] for name, file in read_pages(tmp_path).items()}
    assert tags["a.js"] == tags["b.js"] != tags["c.js"]
    assert all(re.fullmatch('"[0-9a-f]{32}"', tag) for tag in tags.values())


def test_a_page_may_use_its_own_files_alone_and_nothing_inline() -> None:
    assert policy_of(POLICY) == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def test_a_page_in_one_piece_may_run_the_script_that_is_in_it_and_no_other(tmp_path: Path) -> None:
    page = tmp_path / "one.html"
    page.write_text("<style>p { color: red }</style><script>\nrun()\n</script><script src=x></script>")
    hashed = {
        name: base64.b64encode(hashlib.sha256(text).digest()).decode()
        for name, text in (("script", b"\nrun()\n"), ("style", b"p { color: red }"))
    }
    policy = read_page(page).policy
    assert f"; script-src 'sha256-{hashed['script']}'; style-src 'sha256-{hashed['style']}'; " in policy
    assert "'self'" in policy and "unsafe" not in policy
    page.write_text("<p>nothing</p>")
    assert "; script-src 'none'; style-src 'none'; " in read_page(page).policy
