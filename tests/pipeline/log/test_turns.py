"""Whose request an engine takes next: queues of owners, weights, priorities; deaths, old entries, lost queues."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from support.log_contract import LONG_MS, NAMES, SUBMITTED, TOKENIZED, Scene
from support.redis_servers import command
from support.selection import by_night

from pipeline.events import Tokenized
from pipeline.log.protocol import GUEST, Owner, Turn
from pipeline.log.redis import RedisLog

STORIES = by_night(40, 500)
"""Number of random stories of a seed."""


def wait_in_line(scene: Scene, uids: Sequence[str], turn: Turn) -> None:
    """Submit requests and tokenize them."""
    for uid in uids:
        scene.submit(uid, max_queued=10_000)
    entries = {entry.fields["uid"]: entry for entry in scene.log.read(SUBMITTED, "t", max_entries=10_000, block_ms=0)}
    for uid in uids:
        event = Tokenized(token_ids=(5,), fingerprint="t", by="tokenize-0")
        assert scene.log.tokenized(entries[uid], event, turn=turn)


def line(scene: Scene, owner: str, count: int, *, tokens: int = 100, weight: int = 1, first: int = 0) -> None:
    """Let *count* requests of *owner* wait: a0, a1 .."""
    wait_in_line(scene, [f"{owner}{number}" for number in range(first, first + count)], Turn(owner, weight, tokens))


def taken(scene: Scene, engine: Owner, most: int = 8, but: Sequence[str] = ()) -> list[str]:
    entries = scene.log.take(engine, most, control_cursor="0-0", but=but).entries
    return [entry.fields["uid"] for entry in entries]


def test_a_single_request_is_taken_next_however_many_of_another_owner_wait(scene: Scene) -> None:
    engines = [scene.own(f"generate-{index}") for index in range(2)]
    line(scene, "a", 200)
    assert taken(scene, engines[0]) == [f"a{number}" for number in range(8)]
    line(scene, "b", 1)
    assert taken(scene, engines[1], 1) == ["b0"], "in the next admission of any engine"
    assert taken(scene, engines[0]) == [f"a{number}" for number in range(8, 16)]


def test_a_single_request_is_first_also_if_nothing_was_taken_before(scene: Scene) -> None:
    line(scene, "a", 20)
    line(scene, "b", 1, tokens=5000)
    assert taken(scene, scene.own("generate-0"), 1) == ["b0"]


def test_one_owner_is_served_in_the_order_of_priority_and_arrival(scene: Scene) -> None:
    wait_in_line(scene, ["late"], Turn("a", priority=5))
    line(scene, "a", 12)
    wait_in_line(scene, ["early"], Turn("a", priority=-1))
    engine = scene.own("generate-0")
    assert taken(scene, engine) + taken(scene, engine) == ["early", *(f"a{number}" for number in range(12)), "late"]


@pytest.mark.parametrize("sizes", [(100, 100), (50, 800), (800, 50)])
def test_owners_get_tokens_by_their_weights(scene: Scene, sizes: tuple[int, int]) -> None:
    line(scene, "a", 30_000 // sizes[0], tokens=sizes[0], weight=1)
    line(scene, "b", 30_000 // sizes[1], tokens=sizes[1], weight=3)
    engine, tokens = scene.own("generate-0"), Counter[str]()
    while sum(tokens.values()) < 30_000:
        for uid in taken(scene, engine, 3):
            tokens[uid[0]] += sizes[uid[0] == "b"]
    assert 0.2 <= tokens["a"] / sum(tokens.values()) <= 0.3


def test_weights_of_equal_requests_are_exact_within_five_percent(scene: Scene) -> None:
    line(scene, "a", 300, weight=1)
    line(scene, "b", 300, weight=3)
    engine = scene.own("generate-0")
    shares = Counter(uid[0] for _ in range(50) for uid in taken(scene, engine))
    assert shares["a"] / shares.total() == pytest.approx(0.25, rel=0.05)


def test_an_owner_alone_is_not_charged_for_its_past(scene: Scene) -> None:
    engine = scene.own("generate-0")
    line(scene, "a", 50, tokens=10_000)
    while taken(scene, engine):
        pass
    line(scene, "a", 8, first=100)
    line(scene, "b", 8)
    assert Counter(uid[0] for uid in taken(scene, engine)) == {"a": 4, "b": 4}


def test_a_newcomer_gets_no_more_than_its_share(scene: Scene) -> None:
    engine = scene.own("generate-0")
    line(scene, "a", 60)
    line(scene, "b", 60)
    for _ in range(5):
        taken(scene, engine)
    line(scene, "c", 20)
    shares = Counter(uid[0] for _ in range(3) for uid in taken(scene, engine, 6))
    assert sorted(shares.values()) in ([6, 6, 6], [5, 6, 7]), shares


def test_an_owner_whose_queue_is_empty_does_not_jump_it_again_and_again(scene: Scene) -> None:
    engine = scene.own("generate-0")
    line(scene, "a", 100, tokens=100)
    order: list[str] = []
    for number in range(20):  # b sends a long request as soon as the last one was taken
        line(scene, "b", 1, tokens=900, first=number)
        while f"b{number}" not in order:
            order += taken(scene, engine, 1)
    between = "".join(uid[0] for uid in order).strip("b").split("b")
    assert [len(one) for one in between[1:-1]] == [9] * len(between[1:-1])


def test_owners_that_come_again_and_again_starve_none_that_waits(log: RedisLog, scene: Scene) -> None:
    engine, order = scene.own("generate-0"), list[str]()
    line(scene, "v", 5, tokens=900)
    for number in range(100):
        line(scene, f"n{number}-", 1)
        line(scene, f"m{number}-", 1)
        order += taken(scene, engine, 2)
    assert [uid for uid in order if uid[0] == "v"] == [f"v{number}" for number in range(5)]
    assert command(log.url, "HLEN", NAMES.waiting) < 30


def test_an_owner_saves_no_turns_while_its_least_urgent_request_waits(scene: Scene) -> None:
    engine = scene.own("generate-0")
    wait_in_line(scene, ["c-late"], Turn("c", priority=9, overtakes=True))
    line(scene, "a", 100)
    line(scene, "b", 100)
    for _ in range(10):
        taken(scene, engine)
    line(scene, "c", 50)
    line(scene, "d", 50)
    shares = Counter(uid[0] for _ in range(10) for uid in taken(scene, engine))
    assert all(18 <= count <= 22 for count in shares.values()), shares


def test_what_waits_is_found_again_although_its_queue_is_lost(log: RedisLog, scene: Scene) -> None:
    line(scene, "a", 3)
    line(scene, "b", 1)
    command(log.url, "DEL", NAMES.queue("a"))
    engine = scene.own("generate-0")
    assert sorted([*taken(scene, engine), *taken(scene, engine)]) == ["a0", "a1", "a2", "b0"]


def test_priority_counts_across_owners_only_where_it_may(scene: Scene) -> None:
    engine = scene.own("generate-0")
    line(scene, "a", 3)
    wait_in_line(scene, ["b0"], Turn("b", priority=-9, tokens=9000))
    wait_in_line(scene, ["c0"], Turn("c", priority=-1, tokens=9000, overtakes=True))
    wait_in_line(scene, ["d0"], Turn("d", priority=9, overtakes=True))
    assert taken(scene, engine, 3) == ["c0", "b0", "a0"]
    assert taken(scene, engine) == ["a1", "a2", "d0"], "which lets others go first"


def test_nothing_is_taken_of_owners_that_wait_in_the_engine(scene: Scene) -> None:
    engine = scene.own("generate-0")
    line(scene, "a", 9)
    assert taken(scene, engine, 8, but=["a"]) == []
    line(scene, "b", 2)
    assert taken(scene, engine, 8, but=["a"]) == ["b0", "b1"]
    assert taken(scene, engine, 8, but=["a"]) == []
    assert len(taken(scene, engine, 8)) == 8


def test_nothing_is_left_of_the_queues_when_nobody_waits(log: RedisLog, scene: Scene) -> None:
    engine = scene.own("generate-0")
    line(scene, "a", 9)
    line(scene, "b", 9)
    assert len(command(log.url, "KEYS", NAMES.queue("*"))) == 2
    while taken(scene, engine):
        pass
    assert command(log.url, "KEYS", NAMES.queue("*")) == command(log.url, "KEYS", NAMES.waiting) == []


def test_owners_that_were_given_little_are_forgotten(log: RedisLog, scene: Scene) -> None:
    engine = scene.own("generate-0")
    line(scene, "a", 100)
    for number in range(60):
        line(scene, f"u{number}-", 1)
        taken(scene, engine, 2)
    assert command(log.url, "HLEN", NAMES.waiting) < 6


def test_entries_of_an_older_version_and_of_others_are_taken_too(log: RedisLog, scene: Scene) -> None:
    """Also those that came before there was a group, and those that are spoilt."""
    command(log.url, "DEL", NAMES.tokenized)
    for number in range(3):
        command(log.url, "XADD", NAMES.tokenized, "*", "uid", f"old{number}", "frontend", "web-0")
    spoilt = ("-1", "inf", "nan", "1e9", "many", "9" * 40, "1.5", "0x10", "")
    for word in spoilt:
        fields = ("owner", "x" * 300 + word, "weight", word, "tokens", word, "priority", word, "overtakes", word)
        command(log.url, "XADD", NAMES.tokenized, "*", *fields)
    line(scene, "a", 2)
    line(scene, "b", 1)
    scene.prepare()
    engine = scene.own("generate-0")
    got = [entry.fields.get("uid", "?") for _ in range(3) for entry in scene.take(engine)]
    assert Counter(got) == Counter(["old0", "old1", "old2", *"?" * len(spoilt), "a0", "a1", "b0"])


def test_what_an_engine_of_an_older_version_took_is_not_taken_again(log: RedisLog, scene: Scene) -> None:
    """Such an engine takes over from the consumer that waits, as from a dead engine."""
    line(scene, "a", 4)
    line(scene, "b", 1)
    for entry in command(log.url, "XRANGE", NAMES.tokenized, "-", "+")[:2]:
        command(log.url, "XCLAIM", NAMES.tokenized, "generate", "generate-9", 0, entry[0], "JUSTID")
    command(log.url, "XDEL", NAMES.tokenized, command(log.url, "XRANGE", NAMES.tokenized, "-", "+")[2][0])
    assert taken(scene, scene.own("generate-0")) == ["b0", "a3"]


def test_who_waits_is_nobodys_to_take_over(log: RedisLog, scene: Scene) -> None:
    line(scene, "a", 2)
    line(scene, "b", 1)
    engine = scene.own("generate-0")
    assert log.forsaken(TOKENIZED) == [] and log.claim(TOKENIZED, engine, 8) == []
    depth = log.snapshot().occupancy.tokenized
    assert (depth.length, depth.pending, depth.lag) == (3, 0, 3)


@pytest.mark.parametrize("seed", range(4))
def test_in_random_stories_nobody_starves_and_nothing_is_taken_twice(log: RedisLog, scene: Scene, seed: int) -> None:
    """Owners of all sizes and weights send; engines take, end, die, and are taken over. Every request is computed, and
    while an owner waits no other one gets much more than its share."""
    chance = random.Random(seed)
    for story in range(STORIES):
        a_story(log, scene, chance, f"{seed}-{story}")


def a_story(log: RedisLog, scene: Scene, chance: random.Random, name: str) -> None:
    command(log.url, "FLUSHALL")
    scene.prepare()
    weights = {f"o{number}": chance.choice([1, 1, 2, 3, 7]) for number in range(chance.randint(1, 5))}
    sizes: dict[str, int] = {}
    waiting: dict[str, list[str]] = {owner: [] for owner in weights}
    engines: dict[str, Owner | None] = {f"generate-{number}": None for number in range(2)}
    held: dict[str, dict[str, str]] = {slot: {} for slot in engines}
    begun: list[str] = []
    passed: dict[tuple[str, str], float] = {}
    """Tokens by weight that another owner was given since an owner that waits was given some."""
    epoch = 0

    def take(slot: str, most: int) -> None:
        owner = engines[slot]
        assert owner is not None
        for entry in log.take(owner, most, control_cursor="0-0").entries:
            uid, whose = entry.fields["uid"], entry.fields["uid"].partition("-")[0]
            held[slot][uid] = entry.id
            begun.append(uid)
            assert waiting[whose].pop(0) == uid, "an owner's requests are taken in order"
            passed.update({pair: 0.0 for pair in passed if pair[0] == whose or not waiting[pair[0]]})
            for other in weights:
                if other != whose and waiting[other]:
                    before = passed.get((other, whose), 0.0)
                    passed[other, whose] = before + sizes[uid] / weights[whose]
                    assert before <= 900 / weights[other] + 900 / weights[whose] + 1, f"{other} starves"

    for _ in range(chance.randint(10, 40)):
        match chance.choice(["send", "send", "take", "take", "end", "die"]):
            case "send":
                owner, count = chance.choice(list(weights)), chance.randint(1, 6)
                uids = [f"{owner}-{name}-{len(sizes) + number}" for number in range(count)]
                tokens = chance.choice([20, 100, 900])
                wait_in_line(scene, uids, Turn(owner, weights[owner], tokens))
                waiting[owner] += uids
                sizes |= dict.fromkeys(uids, tokens)
            case "take":
                slot = chance.choice(list(engines))
                if engines[slot] is None:
                    epoch += 1
                    engines[slot] = scene.own(slot, nonce=f"n{epoch}")
                take(slot, chance.randint(1, 8))
            case "end":
                slot = chance.choice(list(engines))
                if engines[slot] is not None and held[slot]:
                    uid = chance.choice(list(held[slot]))
                    command(log.url, "XACK", NAMES.tokenized, "generate", held[slot][uid])
                    command(log.url, "XDEL", NAMES.tokenized, held[slot].pop(uid))
            case "die":
                slot, other = chance.sample(list(engines), 2)
                dies, lives = engines[slot], engines[other]
                if dies is not None and lives is not None:
                    log.release(dies)
                    guest = log.acquire(slot, f"{GUEST}{name}{epoch}", LONG_MS)
                    assert guest is not None
                    claimed = {entry.fields["uid"] for entry in log.claim_from(TOKENIZED, lives, guest, 500)}
                    assert claimed == set(held[slot]), "what waits stays in its queue"
                    held[other] |= held[slot]
                    held[slot], engines[slot] = {}, None
                    log.release(guest)
    epoch += 1
    engines["generate-0"] = engines["generate-0"] or scene.own("generate-0", nonce=f"n{epoch}")
    while any(waiting.values()):
        take("generate-0", 8)
    assert sorted(begun) == sorted(sizes), "each is taken once"
