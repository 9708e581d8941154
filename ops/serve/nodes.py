"""Ranks of an engine on several machines (--nnodes): what the flags must say, and where a machine's ranks listen."""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
from typing import TypeVar

from ops.serve.config import ServerConfig
from pipeline.errors import ConfigError
from pipeline.flags import flags_for
from stages.generate.setup.config import GenerateConfig, NodesConfig

C = TypeVar("C", bound=ServerConfig | GenerateConfig)


def with_nodes(config: C) -> C:
    """Return *config* with the address at which ranks on other machines reach those of this one.

    Raises:
        ConfigError: The flags cannot work, or this machine has no such address.
    """
    nodes = config.nodes
    if nodes.nnodes == 1:
        if flags := flags_for([nodes]):
            raise ConfigError(f"{flags[0]} {flags[1]}: needs --nnodes, the number of machines; pass it, too")
        return config
    _check_flags(config, nodes)
    address = nodes.rank_address or _address_to_redis(config)
    try:
        with socket.create_server((address, 0), family=_family(address)):
            pass
    except OSError as error:
        raise ConfigError(
            f"--rank-address {address}: no rank can listen there ({error.strerror}); pass an address of this machine"
        ) from error
    return dataclasses.replace(config, nodes=dataclasses.replace(nodes, rank_address=address))


def _check_flags(config: ServerConfig | GenerateConfig, nodes: NodesConfig) -> None:
    machines, tp = f"--nnodes {nodes.nnodes}", config.engine.tp
    if tp % nodes.nnodes:
        raise ConfigError(
            f"{machines}: --tp {tp} cannot be divided among {nodes.nnodes} machines; pass a --tp that is a multiple of "
            f"{nodes.nnodes}"
        )
    if nodes.node_rank >= nodes.nnodes:
        raise ConfigError(f"--node-rank {nodes.node_rank}: with {machines} it must be 0 to {nodes.nnodes - 1}")
    if not nodes.group:
        raise ConfigError(f"{machines}: --group is missing; pass the same name on all machines of an engine")
    if not config.log.redis_url:
        raise ConfigError(f"{machines}: --redis-url is missing; pass the Redis in which the machines meet")
    if isinstance(config, ServerConfig) and nodes.node_rank:
        raise ConfigError(
            f"--node-rank {nodes.node_rank}: serve runs on the head, node 0; run minisgl stage generate on the others"
        )
    if isinstance(config, ServerConfig):
        flag, num_engines = "--dp", config.serve.dp
    else:
        flag, num_engines = "--replicas", config.worker.replicas
    if num_engines > 1:
        raise ConfigError(
            f"{flag} {num_engines}: with {machines} a command starts ranks of one engine; start another "
            "minisgl stage generate with another --group"
        )


def _address_to_redis(config: ServerConfig | GenerateConfig) -> str:
    """Return this machine's address on the way to Redis. Raises ConfigError if no other machine can reach it."""
    from pipeline.log.address import parse_address

    redis = parse_address(config.log.redis_url)
    try:
        address = redis.address_here()
    except OSError as error:
        raise ConfigError(f"--redis-url {redis.shown} cannot be reached: {error.strerror}") from error
    if not address or _is_local(address):
        raise ConfigError(
            f"--nnodes {config.nodes.nnodes}: this machine reaches Redis by {address or 'a socket'}, where other "
            "machines do not reach its ranks; pass --rank-address with an address that they reach"
        )
    return address


def _is_local(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
