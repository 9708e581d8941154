"""What --redis-url may say, what it means, and what is never shown of it."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.log.address import Address, Secret, connect, parse_address, without_password


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://box", Address("redis://box", (("box", 6379),))),
        ("redis://box:7000/3", Address("redis://box:7000/3", (("box", 7000),), database=3)),
        ("redis://[::1]:7000", Address("redis://[::1]:7000", (("::1", 7000),))),
        ("redis://box/?db=3&protocol=3", Address("redis://box/", (("box", 6379),), database=3, protocol=3)),
        ("redis://:pw@box", Address("redis://***@box", (("box", 6379),), secret=Secret("", "pw"))),
        ("redis://me:p%40%2F@box", Address("redis://***@box", (("box", 6379),), secret=Secret("me", "p@/"))),
        ("unix:///a%20b/c.sock", Address("unix:///a%20b/c.sock", socket="/a b/c.sock")),
        (
            "unix://me:pw@/c.sock?db=1",
            Address("unix://***@/c.sock", socket="/c.sock", database=1, secret=Secret("me", "pw")),
        ),
        ("rediss://box", Address("rediss://box", (("box", 6379),), tls={})),
        (
            "rediss://box?ssl_cert_reqs=none",
            Address(
                "rediss://box", (("box", 6379),), tls={"ssl_cert_reqs": ssl.CERT_NONE, "ssl_check_hostname": False}
            ),
        ),
        (
            "redis+sentinel://me:pw@one,two:7000/main/2?sentinel_username=guard&sentinel_password=s",
            Address(
                "redis+sentinel://***@one,two:7000/main/2",
                (("one", 26379), ("two", 7000)),
                service="main",
                database=2,
                secret=Secret("me", "pw"),
                sentinel_secret=Secret("guard", "s"),
            ),
        ),
        ("redis+cluster://one", Address("redis+cluster://one", (("one", 6379),), is_cluster=True)),
        (
            "rediss+cluster://me:pw@one,two:7000,[::1]:7001/0?protocol=3",
            Address(
                "rediss+cluster://***@one,two:7000,[::1]:7001/0",
                (("one", 6379), ("two", 7000), ("::1", 7001)),
                is_cluster=True,
                secret=Secret("me", "pw"),
                protocol=3,
                tls={},
            ),
        ),
    ],
)
def test_a_url_means_an_address(url: str, expected: Address) -> None:
    assert parse_address(url) == expected
    assert without_password(url).partition("?")[0] == expected.shown


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "no scheme:// given"),
        ("box:6379", "no scheme:// given"),
        ("http://box", "http://.. given"),
        ("redis://", "''"),
        ("redis://box:port", "[Pp]ort"),
        ("redis://box:99999", "[Pp]ort"),
        ("redis://box/zero", "'zero'"),
        ("redis://box/-1", "'-1'"),
        ("redis://box/0/1", "/0/1"),
        ("redis://box/1?db=1", "named twice: by the path and by db="),
        ("redis://box?protocol=4", "protocol='4'"),
        ("redis://box?decode_responses=1", "unknown option decode_responses="),
        ("redis://box?db=1&db=2", "db= is given twice"),
        ("redis://me:a#b@box", "the URL has a #"),
        ("redis://me:pw@box?password_file={there}", "a password and password_file= are given"),
        ("redis://box?password_file=/no/such", "password_file=/no/such"),
        ("rediss://box?ssl_ca_certs=/no/such", "ssl_ca_certs=/no/such"),
        ("rediss://box?ssl_ca_path=/no/such", "ssl_ca_path=/no/such"),
        ("rediss://box?ssl_cert_reqs=maybe", "ssl_cert_reqs='maybe'"),
        ("rediss://box?ssl_check_hostname=maybe", "ssl_check_hostname='maybe'"),
        ("rediss://box?ssl_cert_reqs=none&ssl_check_hostname=yes", "ssl_cert_reqs=required"),
        ("redis://box?ssl_ca_certs={there}", "ssl_ca_certs= is given, but TLS needs rediss://"),
        ("redis://box?sentinel_password=x", "Sentinels need redis\\+sentinel://"),
        ("unix://box/redis.sock", "unix://box/redis.sock names no socket"),
        ("unix://", "names no socket"),
        ("redis+sentinel://box", "names no service"),
        ("redis+sentinel://box/main/0/1", "names no service"),
        ("redis+sentinel://box,/main", "''"),
        ("redis+cluster://box,", "''"),
        ("redis+cluster://box/1", "database 1: a cluster has the log in database 0"),
        ("redis+cluster://box?db=2", "database 2: a cluster has the log in database 0"),
        ("redis+cluster://box/0/1", "/0/1"),
        ("redis+cluster://box?sentinel_password=x", "Sentinels need redis\\+sentinel://"),
        ("redis+cluster://box?ssl_ca_certs={there}", "TLS needs rediss://"),
    ],
)
def test_what_is_none_is_refused_with_what_is_expected(url: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    with pytest.raises(ConfigError, match=f"^--redis-url: .*{words}"):
        parse_address(url.replace("{there}", str(tmp_path / "there")))


@pytest.mark.parametrize(
    "url", ["redis://me:hidden@box/zero", "redis://me:hid#den@box", "redis://me:hidden@box:port", "x://me:hidden@box"]
)
def test_a_refused_url_does_not_show_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_address(url)
    assert "hid" not in str(raised.value)


def test_an_address_does_not_show_its_passwords() -> None:
    address = parse_address("redis+sentinel://me:hidden@box/main?sentinel_password=hidden")
    assert "hidden" not in repr(address)
    assert "hidden" not in repr(connect("redis://me:hidden@box"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("--redis-url=redis://me:secret@host:1/0", "--redis-url=redis://***@host:1/0"),
        ("redis://me:s%40c@host:1/0?protocol=3", "redis://***@host:1/0?protocol=3"),
        ("redis+sentinel://h/main?sentinel_password=secret&protocol=3", "redis+sentinel://h/main?protocol=3"),
        ("redis+sentinel://h/main?sentinel_password=secret", "redis+sentinel://h/main"),
        ("redis://host:1/0", "redis://host:1/0"),
        ("--rows", "--rows"),
    ],
)
def test_an_argument_is_shown_without_its_password(text: str, shown: str) -> None:
    assert without_password(text) == shown


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("redis://127.0.0.1", "127.0.0.1"),
        ("redis+sentinel://127.0.0.2:5,h:6/main", "127.0.0.1"),
        ("redis://[::1]:7/0", "::1"),
        ("unix:///redis.sock", ""),
    ],
)
def test_the_address_of_this_machine_on_the_way_to_a_server_is_known(url: str, here: str) -> None:
    assert parse_address(url).address_here() == here
