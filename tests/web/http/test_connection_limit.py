"""Who loses a connection, and who loses what it holds: plain objects, no sockets."""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import pytest

from pipeline.errors import ConfigError, RequestError
from web.http.connection_limit import KEPT, ConnectionLimit, Proxies, address_of, read_proxies
from web.http.log_limiter import LogLimiter


class One:
    """A connection of a test."""

    def __init__(self, holder: str = "address a", *, is_exempt: bool = False) -> None:
        self.holder = holder
        self.is_exempt = is_exempt
        self.is_cut = False
        self.error: RequestError | None = None

    def cut(self) -> None:
        self.is_cut = True

    def released(self, error: RequestError) -> None:
        self.error = error


def limit_of(most: int, *, several_keys: bool = False, most_bytes: int = 1000) -> ConnectionLimit:
    return ConnectionLimit(most, LogLimiter(), has_several_keys=lambda: several_keys, most_bytes=most_bytes)


def enter(connection_limit: ConnectionLimit, num: int, holder: str, *, working: bool = True) -> list[One]:
    members = [One(holder) for _ in range(num)]
    for one in members:
        assert connection_limit.enter(one) is None
        if not working:
            connection_limit.waits(one)
    return members


def belong(connection_limit: ConnectionLimit, members: list[One], key: str) -> None:
    for one in members:
        connection_limit.belongs(one, key, connection_limit.key_share)


def test_an_address_has_three_quarters_and_others_have_the_rest() -> None:
    connection_limit = limit_of(16)
    enter(connection_limit, 12, "address a")
    error = connection_limit.enter(One("address a"))
    assert error is not None and (error.status, error.code) == (429, "too_many_connections")
    assert "12 open connections" in error.message and "12 of 16" in error.message and "address a" in error.message
    enter(connection_limit, 4, "address b")
    error = connection_limit.enter(One("address c"))
    assert error is not None and (error.status, error.code) == (503, "overloaded")


def test_a_new_connection_over_the_share_takes_the_place_of_an_idle_one_of_the_same_client() -> None:
    connection_limit = limit_of(16)
    first, second, third, *rest = enter(connection_limit, 12, "address a", working=False)
    connection_limit.waits(first)  # after its next request
    (other,) = enter(connection_limit, 1, "address b", working=False)
    new = One("address a")
    assert connection_limit.enter(new) is None
    assert second.is_cut and not first.is_cut and not other.is_cut
    for one in (*rest, first, third, new):
        connection_limit.works(one)
    connection_limit.receives(third)
    assert connection_limit.enter(One("address a")) is None
    assert third.is_cut and not other.is_cut


def test_who_holds_most_loses_first_an_idle_connection_then_a_viewer_never_another_answer() -> None:
    connection_limit = limit_of(16)
    much = enter(connection_limit, 8, "address a")
    some = enter(connection_limit, 6, "address b", working=False)
    little = enter(connection_limit, 2, "address c", working=False)
    connection_limit.waits(much[5])
    connection_limit.views(much[3])
    new = [One(f"address {number}") for number in range(3)]
    assert [connection_limit.enter(one) for one in new] == [None, None, None]
    assert [one.is_cut for one in much] == [False, False, False, True, False, True, False, False]
    assert [one.is_cut for one in some] == [True, *[False] * 5]  # nothing of the largest is spare any more
    assert not any(one.is_cut for one in [*little, *new])
    assert connection_limit.num_open == 16


def test_a_newcomer_of_who_holds_most_is_refused_itself_rather_than_cutting_a_viewer_or_others() -> None:
    connection_limit = limit_of(16)
    much = enter(connection_limit, 10, "address a")
    connection_limit.views(much[0])
    little = enter(connection_limit, 6, "address b", working=False)
    error = connection_limit.enter(One("address a"))
    assert error is not None and error.status == 503
    assert not any(one.is_cut for one in much + little)


def test_of_several_keys_one_has_half_and_a_single_one_has_three_quarters() -> None:
    for several, share in ((True, 8), (False, 12)):
        connection_limit = limit_of(16, several_keys=several)
        members = enter(connection_limit, share, "address a")
        belong(connection_limit, members, "key k")
        more = enter(connection_limit, 1, "address a")
        with pytest.raises(RequestError, match=f" {share} ") as caught:
            belong(connection_limit, more, "key k")
        assert caught.value.code == "too_many_connections" and more[0].holder == "address a"
        connection_limit.waits(members[3])
        belong(connection_limit, more, "key k")
        assert members[3].is_cut and more[0].holder == "key k"


def test_connections_of_a_key_do_not_count_for_the_address_that_others_share() -> None:
    connection_limit = limit_of(16, several_keys=True)
    belong(connection_limit, enter(connection_limit, 8, "address nat"), "key k")
    belong(connection_limit, enter(connection_limit, 7, "address nat"), "key l")
    assert connection_limit.enter(One("address nat")) is None


def test_a_quarter_may_be_viewers_until_they_end() -> None:
    connection_limit = limit_of(16)
    members = enter(connection_limit, 5, "address a")
    for one in members[:4]:
        connection_limit.views(one)
    with pytest.raises(RequestError, match=r"4 .* 16") as caught:
        connection_limit.views(members[4])
    assert caught.value.status == 429
    connection_limit.waits(members[0])
    connection_limit.views(members[4])


def test_a_key_may_have_a_limit_of_its_own_for_its_viewers() -> None:
    connection_limit = limit_of(16)
    members = enter(connection_limit, 8, "key k")
    for one in members[:6]:
        connection_limit.views(one, 6)
    with pytest.raises(RequestError, match=r"6 open streams of events, of at most 6 \(its limit `viewers`\)"):
        connection_limit.views(members[6], 6)


def test_sockets_of_the_file_system_and_trusted_proxies_have_no_share_but_count() -> None:
    connection_limit = limit_of(4)
    for _ in range(4):
        one = One("socket", is_exempt=True)
        assert connection_limit.enter(one) is None
        connection_limit.works(one)
    assert connection_limit.enter(One("address a")) is not None


def test_kept_places_are_few_and_come_back() -> None:
    connection_limit = limit_of(1)
    several = [One() for _ in range(KEPT + 1)]
    assert [connection_limit.keep(one) for one in several] == [*[True] * KEPT, False]
    connection_limit.leave(several[0])
    assert connection_limit.keep(several[-1])


def test_whatever_happens_nobody_is_counted_twice_or_forgotten() -> None:
    drawn = random.Random(3)
    connection_limit = limit_of(20, several_keys=True, most_bytes=500)
    there: list[One] = []
    for _ in range(5000):
        one = drawn.choice(there) if there else None
        what = drawn.choice(("enter", "enter", "waits", "works", "receives", "views", "belongs", "leave", "hold"))
        with contextlib.suppress(RequestError):
            if what == "enter" or one is None:
                new = One(f"address {drawn.randrange(4)}")
                if connection_limit.enter(new) is None:
                    there.append(new)
            elif what == "belongs":
                connection_limit.belongs(one, f"key {drawn.randrange(3)}", connection_limit.key_share)
            elif what == "hold":
                connection_limit.hold(one, drawn.randrange(200))
            elif what == "leave":
                connection_limit.leave(one)
                there.remove(one)
            else:
                getattr(connection_limit, what)(one)
        there = [each for each in there if not each.is_cut]
        assert connection_limit.num_open == len(there) <= 20 and connection_limit.num_bytes <= 500
        counts = Counter(each.holder for each in there)
        assert all(num <= (10 if holder.startswith("key") else 15) for holder, num in counts.items())


def test_who_holds_most_bytes_loses_its_largest_request_and_the_small_one_of_another_stays() -> None:
    connection_limit = limit_of(16, most_bytes=1000)
    attacker, others = enter(connection_limit, 3, "address a"), enter(connection_limit, 2, "address b")
    connection_limit.hold(others[0], 400)  # the largest request, but not of the largest holder
    for one, num_bytes in zip(attacker, (200, 300, 90), strict=True):
        connection_limit.hold(one, num_bytes)
    connection_limit.hold(others[1], 50)
    assert attacker[1].error is not None and attacker[1].error.code == "overloaded"
    assert "590 bytes" in attacker[1].error.message and "300" in attacker[1].error.message
    assert [one.error for one in (*others, attacker[0], attacker[2])] == [None] * 4
    assert connection_limit.num_bytes == 740
    connection_limit.leave(others[0])
    assert connection_limit.num_bytes == 340


def test_the_client_behind_trusted_proxies_is_the_last_address_that_is_none_of_them() -> None:
    proxies = read_proxies(["10.0.0.0/8", "fd00::1"])
    peer = "10.0.0.5"
    for said, client in (
        (["1.2.3.4"], "1.2.3.4"),
        (["6.6.6.6, 1.2.3.4"], "1.2.3.4"),  # the client wrote the first
        (["6.6.6.6", "1.2.3.4, 10.1.1.1"], "1.2.3.4"),
        (["2001:db8::7,fd00::1"], "2001:db8::7"),
        (["::ffff:1.2.3.4"], "1.2.3.4"),
        ([], peer),
        (["10.9.9.9"], peer),
        (["1.2.3.4, unknown"], peer),
        (["1.2.3.4,"], peer),
        (["1" * 10_000], peer),
    ):
        assert proxies.client_of(peer, said) == client, said
    assert proxies.trust(peer) and proxies.trust("::ffff:10.0.0.1") and proxies.trust("fd00::1")
    assert not proxies.trust("fd00::2") and not Proxies().trust(peer)
    for wrong in ("proxy.local", "10.0.0.5/8", "10.0.0"):
        with pytest.raises(ConfigError, match=r"--trusted-proxies: .*10\.0\.0\.0/8"):
            read_proxies([wrong])


def test_an_address_of_ipv6_stands_for_its_network() -> None:
    assert address_of("2001:db8::7") == address_of("2001:db8::9:9") == "address 2001:db8::/64"
    assert address_of("2001:db8:0:1::7") != address_of("2001:db8::7")
    assert address_of("::ffff:1.2.3.4") == address_of("1.2.3.4") == "address 1.2.3.4"
