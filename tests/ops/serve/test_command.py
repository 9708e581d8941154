"""What `serve` decides before it starts anything."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.redis_servers import command
from support.servers import free_port
from support.tool import fresh_logs

from minisgl import main
from ops.serve import command as serve
from ops.serve.config import ServerConfig, parse_command
from pipeline.archive.folder import archive_id
from pipeline.errors import ConfigError
from pipeline.log.check import check_server
from pipeline.log.redis import RedisLog
from pipeline.names import ARCHIVE, DETOKENIZE, GENERATE, TOKENIZE, WEB, Names
from pipeline.process import redis_server
from pipeline.process.config import ModelConfig
from pipeline.process.redis_server import machine_memory_bytes
from stages.generate.model.checkpoint import DEMO_FOLDER
from web.config import LEAST_LOG_BYTES

GIB = 1 << 30


class Recorded:
    """Processes that are not started."""

    def __init__(self, *_: object) -> None:
        self.url = ""
        self.added: list[tuple[str, Sequence[str], dict[str, Any]]] = []

    def add(self, stage: str, flags: Sequence[str], **options: Any) -> None:
        self.added.append((stage, flags, options))

    def run(self, *_: object) -> int:
        return 0

    def flags(self, stage: str) -> list[str]:
        """Return the flags of each worker of *stage*, but for what is free, which differs from run to run."""
        texts = (" ".join(flags) for added, flags, _ in self.added if added == stage)
        return [re.sub("--free-bytes [0-9]+", "--free-bytes N", text) for text in texts]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    processes = Recorded()
    monkeypatch.setattr(serve, "_with_redis", lambda config: contextlib.nullcontext(processes))
    monkeypatch.setattr(serve, "Processes", lambda *_: processes)
    monkeypatch.setattr("pipeline.log.check.check_server", lambda *_: None)
    with fresh_logs():
        yield processes


def parsed(*flags: str) -> ServerConfig:
    config = parse_command(["serve", *flags], {})
    assert isinstance(config, ServerConfig)
    return config


def test_a_folder_beside_the_archive_of_the_namespace_is_refused_and_not_made(
    recorded: Recorded, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def archive(name: str, *flags: str) -> int:
        return main(["stage", "archive", "--to", str(tmp_path / name), "--redis-url", redis_url, *flags])

    assert archive("one") == 0 and recorded.flags(ARCHIVE) != []
    with contextlib.closing(RedisLog(redis_url, Names())) as log:
        assert log.open_archive(archive_id(tmp_path / "one")) == archive_id(tmp_path / "one")
    assert archive("one") == 0
    assert archive("new") == 2
    assert f"--to {tmp_path / 'new'}: " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert archive("new", "--namespace", "another") == 0


def test_a_server_makes_its_archive_only_if_its_namespace_has_no_other(
    recorded: Recorded, redis_url: str, tmp_path: Path
) -> None:
    recorded.url = redis_url
    flags = ["serve", "--port", str(free_port()), "--archive"]
    assert serve.main([*flags, str(tmp_path / "one")], {}) == 0
    assert recorded.flags(ARCHIVE) == [f"--to {tmp_path / 'one'}"]
    with contextlib.closing(RedisLog(redis_url, Names())) as log:
        log.open_archive(archive_id(tmp_path / "one"))
    with pytest.raises(ConfigError, match=rf"--archive {tmp_path / 'new'}: "):
        serve.main([*flags, str(tmp_path / "new")], {})
    assert not (tmp_path / "new").exists()


def test_a_server_that_cannot_start_makes_no_archive(redis_url: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, fresh_logs():
        port = str(taken.getsockname()[1])
        for said, *flags in (
            ("--repair is for the data of the embedded server", "--repair", "--port", str(free_port())),
            (f"port {port}", "--port", port),
        ):
            with pytest.raises(ConfigError, match=said):
                serve.main(["serve", "--archive", str(tmp_path / "new"), "--redis-url", redis_url, *flags], {})
            assert not (tmp_path / "new").exists()


def test_each_engine_of_a_server_has_its_share_and_a_detokenizer(recorded: Recorded) -> None:
    flags = ["--dp", "2", "--tp", "2", "--device", "cpu", "--port", str(free_port())]
    assert serve.main(["serve", *flags], {}) == 0
    model = f"--model {DEMO_FOLDER}"
    assert recorded.flags(GENERATE) == [
        f"{model} --tp 2 --device cpu --engines 2 --free-bytes N",
        f"{model} --tp 2 --device cpu --engine 1 --engines 2 --free-bytes N",
    ]
    assert recorded.flags(DETOKENIZE) == [model, model]
    assert [options["num_ranks"] for stage, _, options in recorded.added if stage == GENERATE] == [2, 2]
    assert [len(recorded.flags(stage)) for stage in (TOKENIZE, WEB)] == [1, 1]


def test_engines_that_a_stage_starts_together_have_their_shares(recorded: Recorded) -> None:
    flags = ["--replicas", "2", "--device", "cpu", "--redis-url", "redis://h"]
    assert serve.main(["stage", "generate", *flags], {}) == 0
    assert [told.partition("--device cpu ")[2] for told in recorded.flags(GENERATE)] == [
        "--engines 2 --free-bytes N",
        "--engine 1 --engines 2 --free-bytes N",
    ]


def test_a_single_engine_is_told_of_no_share(recorded: Recorded) -> None:
    assert serve.main(["serve", "--port", str(free_port())], {}) == 0
    assert recorded.flags(GENERATE) == recorded.flags(DETOKENIZE) == [f"--model {DEMO_FOLDER}"]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--model someone/small@main", ("someone/small",)),
        ("--model someone/small@main --served-model-name mine", ("mine",)),
        ("--model https://hf.co/someone/small-GGUF:Q4_K_M", ("someone/small-GGUF:Q4_K_M",)),
        ("--model smollm2", ("smollm2",)),
    ],
)
def test_a_model_that_is_fetched_is_served_under_its_own_name_or_the_given_one(
    flags: str, names: Sequence[str], tmp_path: Path
) -> None:
    told = serve._with_model(parsed(*flags.split(), "--tokenizer", "someone/small"), tmp_path)
    assert (told.model, told.names.served_model_name) == (ModelConfig(str(tmp_path)), names)


def budget(*flags: str) -> int | None:
    return serve._with_budget(parsed(*flags)).clients.max_log_bytes


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a container's limit is, for a machine with 32 GiB."""
    limit = tmp_path / "memory.max"
    limit.write_text("max\n")
    monkeypatch.setattr(redis_server, "MEMORY_LIMITS", (tmp_path / "missing", limit))
    pages = {"SC_PHYS_PAGES": 32 * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    return limit


def test_the_log_of_an_embedded_redis_may_take_a_tenth_of_the_memory(memory: Path) -> None:
    assert budget() == 32 * GIB // 10
    memory.write_text(f"{8 * GIB}\n")  # of this container
    assert budget() == 8 * GIB // 10
    memory.write_text(f"{GIB // 8}\n")
    assert budget() == LEAST_LOG_BYTES


def test_a_size_that_is_given_counts_and_the_log_in_a_redis_of_the_users_has_none_by_itself() -> None:
    assert budget("--max-log-bytes", "64M") == 64 << 20
    assert budget("--max-log-bytes", "0") == 0
    assert budget("--redis-url", "redis://h") is None
    assert budget("--redis-url", "redis://h", "--max-log-bytes", "64M") == 64 << 20


def test_the_limit_of_a_container_counts_only_where_it_is_lower(memory: Path) -> None:
    memory.write_text("9223372036854771712")  # how cgroup v1 says that there is none
    assert machine_memory_bytes() == 32 * GIB


def test_an_embedded_redis_refuses_requests_only_above_the_size_of_the_log(tmp_path: Path) -> None:
    with serve._with_redis(parsed("--data-dir", str(tmp_path), "--max-log-bytes", "30M")) as processes:
        told = command(processes.url, "CONFIG", "GET", "maxmemory")
        policy = command(processes.url, "CONFIG", "GET", "maxmemory-policy")
    assert (told, policy) == ([b"maxmemory", b"%d" % (40 << 20)], [b"maxmemory-policy", b"noeviction"])


def test_the_embedded_redis_has_no_replicas_whose_acknowledgement_could_be_waited_for(tmp_path: Path) -> None:
    config = parsed("--data-dir", str(tmp_path / "data"), "--acks", "1")
    refused = "--acks 1: the embedded Redis has no replicas, so every request would get 503; pass --redis-url"
    with pytest.raises(ConfigError, match=refused), serve._with_redis(config):
        pass
    with serve._with_redis(parsed("--data-dir", str(tmp_path / "data"), "--acks-disk")):
        pass


@pytest.fixture
def full_at_20_mib(redis_url: str) -> Iterator[str]:
    command(redis_url, "CONFIG", "SET", "maxmemory", 20 << 20)
    yield redis_url
    command(redis_url, "CONFIG", "SET", "maxmemory", 0)


def test_a_log_that_may_be_as_large_as_its_redis_is_refused(full_at_20_mib: str) -> None:
    config = parsed("--redis-url", full_at_20_mib, "--max-log-bytes", "20M")
    refused = (
        r"--max-log-bytes 20971520: Redis at .* at its maxmemory 20971520; pass less, or run: redis-cli CONFIG SET"
    )
    with pytest.raises(ConfigError, match=refused), serve._with_redis(config):
        pass
    check_server(full_at_20_mib, (20 << 20) - 1)
    check_server(full_at_20_mib)
