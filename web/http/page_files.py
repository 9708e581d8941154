"""The files of the pages that this server shows: read once at the start, sent with the headers that keep a page safe.

Knows no routes. A name that is not in the folder leads nowhere, because no name becomes a path.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PAGES: Final = Path(__file__).resolve().parents[1] / "pages"
TYPES: Final[Mapping[str, str]] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}
PLAIN: Final = "text/plain; charset=utf-8"
"""The type of all other files, such as licences."""
POLICY: Final[Mapping[str, str]] = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",
    "connect-src": "'self'",
    "font-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
"""What a page may load and do: its own files and this server, nothing inline."""
_INLINE: Final = {name: re.compile(rf"<{name}>(.*?)</{name}>".encode(), re.DOTALL) for name in ("script", "style")}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, and what a browser is told about it."""

    content: bytes
    content_type: str
    policy: str
    """The Content-Security-Policy."""

    @property
    def tag(self) -> str:
        """Its ETag, a hash of the content."""
        return hashlib.sha256(self.content).hexdigest()[:32]

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every answer with the file, including 304."""
        return {
            "Content-Security-Policy": self.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
            "ETag": f'"{self.tag}"',
        }


def read_pages(folder: Path) -> dict[str, PageFile]:
    """Return name -> file for all files in *folder* and below, except hidden ones and links that lead out of it."""
    root = folder.resolve()
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_hidden = any(part.startswith(".") for part in name.split("/"))
        if path.is_file() and not is_hidden and path.resolve().is_relative_to(root):
            found[name] = PageFile(path.read_bytes(), TYPES.get(path.suffix.lower(), PLAIN), policy_of(POLICY))
    return found


def read_page(path: Path) -> PageFile:
    """Return a page that contains its scripts and styles. The policy allows only these, by their hashes."""
    content = path.read_bytes()
    hashes = {name: " ".join(map(_hash_of, pattern.findall(content))) for name, pattern in _INLINE.items()}
    own = {f"{name}-src": hashes[name] or "'none'" for name in _INLINE}
    return PageFile(content, TYPES[path.suffix], policy_of({**POLICY, **own}))


def policy_of(parts: Mapping[str, str]) -> str:
    """Return a Content-Security-Policy."""
    return "; ".join(f"{name} {value}" for name, value in parts.items())


def _hash_of(inline: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline).digest()).decode()}'"
