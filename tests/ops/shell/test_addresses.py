"""Which addresses the shell takes, and where it finds the server that it was started with."""

from __future__ import annotations

import pytest

from ops.shell.server import Server, base_of
from pipeline.errors import ConfigError
from web.http.listener import url_here


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:1919", "http://127.0.0.1:1919"),
        ("http://127.0.0.1:1919/", "http://127.0.0.1:1919"),
        (" http://127.0.0.1:1919/v1/ ", "http://127.0.0.1:1919"),
        ("https://host/api/v1", "https://host/api"),
        ("http://[::1]:80/v1?x=1#y", "http://[::1]:80"),
        ("http://host/v1beta", "http://host/v1beta"),
    ],
)
def test_an_address_may_have_v1_or_not(url: str, base: str) -> None:
    assert base_of(url) == base


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:1919", "ftp://h", "http://", "http://h:0", "http://h:99999", "http://[h"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        base_of(url)


def test_the_name_of_a_server_shows_no_password() -> None:
    assert Server("http://user:secret@host:80/api").name == "http://host:80/api"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:5"),
        ("0.0.0.0", "http://127.0.0.1:5"),
        ("::", "http://[::1]:5"),
        ("fe80::1", "http://[fe80::1]:5"),
        ("example", "http://example:5"),
    ],
)
def test_a_server_that_listens_everywhere_is_found_here(host: str, url: str) -> None:
    assert url_here(host, 5) == url
