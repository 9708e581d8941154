"""Which web pages may use this server: `--allow-origin` and `--allow-host`. Knows no routes.

A browser sends what any page asks for, also to a server that only its own machine can reach.

a page of another origin   its requests have a foreign Origin header, or Sec-Fetch-Site: cross-site            403
DNS rebinding              the name of the page points to this server at last, so only the Host is foreign     403
a form                     a page can send text to any server, but has to ask before it may send JSON          415

No page knows an API key, so the first two do not apply to a request that has one.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pipeline.errors import ConfigError, RequestError
from web.config import OriginConfig
from web.http.listener import ANY_ADDRESS

if TYPE_CHECKING:
    from werkzeug.datastructures import Headers

ANY: Final = "*"
MAX_AGE_S: Final = 7200
"""How long a browser may remember the answer to a preflight; Chromium's limit."""
METHODS: Final = "GET, HEAD, POST, DELETE"
SHOWN: Final = 100
"""Most characters of a header in an error."""
_NAME: Final = r"[a-z0-9._-]+"
_HOST: Final = re.compile(rf"({_NAME}|\[[0-9a-f:.]+\])(?::[0-9]*)?")
_ORIGIN: Final = re.compile(rf"([a-z][a-z0-9+.-]*)://(?:{_NAME}|\[[0-9a-f:.]+\])(:[0-9]{{1,5}})?")
_DEFAULT_PORTS: Final = (("http", ":80"), ("https", ":443"))
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_JSON: Final = re.compile(r"application/([a-z0-9.-]+\+)?json")
_FORM: Final = ("", "application/x-www-form-urlencoded")
"""What simple clients say of any body, such as `curl -d`; so can any page, whose request then has an Origin."""


@dataclass(frozen=True, slots=True)
class Origins:
    """The pages that may send requests, and the names by which they may call the server."""

    origins: frozenset[str] = frozenset()
    """Origins as browsers write them; ANY means all."""
    hosts: frozenset[str] = frozenset()
    """Names and addresses besides loopback and the address that a client connected to; ANY means all."""

    def allow(self, origin: str) -> bool:
        """Return whether a flag allows the pages of *origin*."""
        return origin in self.origins or ANY in self.origins

    def refusal(self, headers: Headers, own_address: str, *, is_open: bool) -> RequestError | None:
        """Return the error for a request without a key that a foreign page may have sent.

        *own_address*: the address that the client connected to. *is_open*: the path tells nothing private, so probes
        may call the server by any name, and links of other pages may lead there.
        """
        host, origin = headers.get("host", ""), headers.get("origin")
        if not is_open and not self._is_named(host, own_address):
            return _foreign_host(host)
        if origin is not None:
            return self._origin_refusal(origin, host)
        if headers.get("sec-fetch-site") != "cross-site":
            return None
        is_link = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
        return None if is_open and is_link else _cross_site()

    def preflight_refusal(self, headers: Headers) -> RequestError | None:
        """Return the error for the preflight of a page that may not send a request."""
        return self._origin_refusal(headers["origin"], headers.get("host", ""))

    def preflight(self, headers: Headers) -> dict[str, str]:
        """Return the headers that answer the preflight of an allowed page; `open_to` adds more."""
        given = (name.strip() for name in headers.get("access-control-request-headers", "").split(","))
        names = [name for name in given if _TOKEN.fullmatch(name)]
        answer = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(MAX_AGE_S)}
        if names:
            answer["Access-Control-Allow-Headers"] = ", ".join(names)
        if headers.get("access-control-request-private-network") == "true":
            answer["Access-Control-Allow-Private-Network"] = "true"
        return answer

    def open_to(self, origin: str | None, headers: Headers) -> None:
        """Let the pages of *origin* read the answer with these *headers*, if they are allowed."""
        if not self.origins:
            return
        is_any = ANY in self.origins
        if origin is not None and self.allow(origin):
            headers["Access-Control-Expose-Headers"] = ", ".join(dict.fromkeys(name for name, _ in headers))
            headers["Access-Control-Allow-Origin"] = ANY if is_any else origin
        if not is_any:
            headers.add("Vary", "Origin")

    def _origin_refusal(self, origin: str, host: str) -> RequestError | None:
        return None if self.allow(origin) or _is_own(origin, host) else _foreign_origin(origin)

    def _is_named(self, host: str, own_address: str) -> bool:
        """Return whether a Host header names this server. Clients of HTTP/1.0 may send none; browsers always do."""
        if not host or ANY in self.hosts:
            return True
        found = _HOST.fullmatch(host.lower())
        if not found:
            return False
        name = _plain(found[1])
        return name == "localhost" or name in self.hosts or name == _plain(own_address) or _is_loopback(name)


def is_preflight(method: str, headers: Headers) -> bool:
    """Return whether the request is a preflight: a browser asks whether a page may send a request."""
    return method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def body_refusal(headers: Headers) -> RequestError | None:
    """Return the error for a body that does not say it is JSON."""
    given = headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if _JSON.fullmatch(kind) or (kind in _FORM and "origin" not in headers):
        return None
    seen = f"`{given[:SHOWN]}`" if given else "nothing"
    message = f"Content-Type: {seen} given, expected `application/json`; send the body as JSON with that header."
    return RequestError(message, code="unsupported_media_type", status=415)


def read_origins(config: OriginConfig, host: str) -> Origins:
    """Return what the flags `--allow-origin` and `--allow-host` allow on a server that listens on *host*.

    Raises:
        ConfigError: An origin or a name is malformed.
    """
    hosts = {_read_host(text) for text in config.allow_host}
    if not hosts and host in ANY_ADDRESS:
        hosts.add(ANY)
    return Origins(frozenset(map(_read_origin, config.allow_origin)), frozenset({*hosts, _plain(host.lower())}))


def _read_origin(text: str) -> str:
    """Return an origin as browsers write it: in lower case, without the port that its scheme has anyway."""
    found = _ORIGIN.fullmatch(text.lower())
    if not found and text != ANY:
        raise ConfigError(
            f"--allow-origin: {text!r}: must be scheme://host or scheme://host:port without a path, such as "
            f"https://chat.example.com, or {ANY} for all pages"
        )
    is_default = found and (found[1], found[2]) in _DEFAULT_PORTS
    return text.lower().removesuffix(found[2]) if found and is_default else text.lower()


def _read_host(text: str) -> str:
    name = text.lower()
    if name != ANY and not re.fullmatch(_NAME, name) and not _address(name):
        raise ConfigError(
            f"--allow-host: {text!r}: must be a name or an address without scheme and port, such as chat.example.com, "
            f"or {ANY} for all names"
        )
    return _plain(name)


def _is_own(origin: str, host: str) -> bool:
    """Return whether *origin* is that of a page of this server. A proxy may speak HTTPS for it, so any scheme does."""
    scheme, _, rest = origin.partition("://")
    return scheme in ("http", "https") and rest != "" and rest.lower() == host.lower()


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _plain(name: str) -> str:
    """Return an address in its usual spelling, without brackets. Any other *name* stays as it is."""
    return str(_address(name) or name)


def _is_loopback(name: str) -> bool:
    address = _address(name)
    return address is not None and address.is_loopback


def _foreign_host(host: str) -> RequestError:
    message = (
        f"Host: `{host[:SHOWN]}` is not a name of this server. If it should be, start the server with "
        "`--allow-host NAME` (MINISGL_ALLOW_HOST), without the port, or with API keys."
    )
    return RequestError(message, code="host_not_allowed", status=403)


def _foreign_origin(origin: str) -> RequestError:
    advice = (
        "Files and sandboxed pages have this one; serve the page over HTTP, and allow its origin with `--allow-origin`."
        if origin == "null"
        else f"To allow it, start the server with `--allow-origin {origin[:SHOWN]}` (MINISGL_ALLOW_ORIGIN)."
    )
    message = f"Origin: `{origin[:SHOWN]}`: pages of this origin may not use this server. {advice}"
    return RequestError(message, code="origin_not_allowed", status=403)


def _cross_site() -> RequestError:
    message = (
        "Sec-Fetch-Site: `cross-site`: a page of another site sent this. Open the address in a tab of its own, or "
        "allow the page with `--allow-origin URL` and use `fetch`."
    )
    return RequestError(message, code="origin_not_allowed", status=403)
