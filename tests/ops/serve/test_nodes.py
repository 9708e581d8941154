"""What the flags of an engine on several machines must say, before anything starts."""

from __future__ import annotations

import pytest

from ops.serve.config import ServerConfig, parse_command
from ops.serve.nodes import with_nodes
from pipeline.errors import ConfigError
from stages.generate.setup.config import GenerateConfig, NodesConfig

REDIS = "--redis-url redis://127.0.0.1:1/0"
TWO = "--tp 2 --nnodes 2 --group g"
GOOD = f"--tp 4 --nnodes 2 --group g {REDIS} --rank-address 127.0.0.1"


def parsed(line: str) -> ServerConfig | GenerateConfig:
    config = parse_command(line.split(), {})
    assert isinstance(config, ServerConfig | GenerateConfig)
    return config


@pytest.mark.parametrize("line", [f"serve {GOOD}", f"stage generate {GOOD} --node-rank 1", "serve --tp 4", "serve"])
def test_flags_that_can_work_stay_as_they_are(line: str) -> None:
    config = parsed(line)
    assert with_nodes(config) == config


def test_ranks_listen_at_the_address_that_reaches_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.log.address.Address.address_here", lambda address: "127.0.0.1")
    monkeypatch.setattr("ops.serve.nodes._is_local", lambda address: False)
    config = with_nodes(parsed(f"stage generate --tp 4 --nnodes 2 --group g {REDIS}"))
    assert config.nodes == NodesConfig(2, 0, "g", "127.0.0.1")


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("serve --group g", "--group g: needs --nnodes"),
        ("stage generate --node-rank 1 --tp 2", "--node-rank 1: needs --nnodes"),
        (
            "serve --nnodes 2",
            r"--nnodes 2: --tp 1 cannot be divided among 2 machines; pass a --tp that is a multiple of 2",
        ),
        (f"serve {GOOD} --nnodes 3", r"--nnodes 3: --tp 4 cannot be divided among 3 machines"),
        (f"stage generate {GOOD} --node-rank 2", "--node-rank 2: with --nnodes 2 it must be 0 to 1"),
        (f"serve --tp 2 --nnodes 2 {REDIS}", "--nnodes 2: --group is missing; pass the same name on all"),
        (f"serve {TWO}", "--nnodes 2: --redis-url is missing"),
        (
            f"serve {GOOD} --node-rank 1",
            "--node-rank 1: serve runs on the head, .* run minisgl stage generate on",
        ),
        (f"stage generate {GOOD} --replicas 2", "--replicas 2: .* start another minisgl stage generate with"),
        (f"serve {GOOD} --dp 2", "--dp 2: with --nnodes 2 .* start another minisgl stage generate with"),
        (
            f"serve --tp 2 --nnodes 2 --group g {REDIS}",
            "this machine reaches Redis by 127.0.0.1, .* pass --rank-address",
        ),
        (
            "serve --tp 2 --nnodes 2 --group g --redis-url unix:///s",
            "reaches Redis by a socket, .* pass --rank-address",
        ),
        (
            f"serve {TWO} --redis-url redis://no.invalid",
            "--redis-url redis://no.invalid cannot be reached: ",
        ),
        (
            f"serve {GOOD} --rank-address 192.0.2.1",
            "--rank-address 192.0.2.1: no rank can listen there .*; pass an address of this machine",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(line: str, refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        with_nodes(parsed(line))


@pytest.mark.parametrize(("node", "ranks"), [(0, [0, 1]), (1, [2, 3])])
def test_machines_divide_the_ranks_in_order(node: int, ranks: list[int]) -> None:
    assert list(NodesConfig(2, node, "g").ranks_here(4)) == ranks
    assert list(NodesConfig().ranks_here(4)) == [0, 1, 2, 3]
