"""The Idempotency-Key header without HTTP."""

from __future__ import annotations

import pytest

from pipeline.errors import RequestError
from pipeline.log.protocol import Once
from web.wire.idempotency import once_of


def test_a_key_is_1_to_255_visible_characters() -> None:
    for key in ("a", "~" * 255, '"quoted"'):
        assert once_of(key, "/e", b"") is not None
    assert once_of(None, "/e", b"") is None
    for key in ("", "a" * 256, "a b", "ä", "a\t", "\x7f"):
        with pytest.raises(RequestError) as caught:
            once_of(key, "/e", b"")
        assert (caught.value.status, caught.value.param) == (400, "Idempotency-Key")


def test_scope_and_key_make_the_name_and_endpoint_and_body_what_must_be_the_same() -> None:
    def once(key: str = "k", endpoint: str = "/e", body: bytes = b"b", scope: str = "") -> Once:
        made = once_of(key, endpoint, body, scope=scope)
        assert made is not None
        return made

    assert once() == once()
    for other in (once(key="K"), once(scope="ann"), once(key="nk", scope="an"), once(key="k2")):
        assert other.key != once().key and other.digest == once().digest
    assert once(scope="a", key="bc").key != once(scope="ab", key="c").key
    for other in (once(endpoint="/f"), once(body=b"B"), once(endpoint="/", body=b"eb")):
        assert other.digest != once().digest and other.key == once().key
