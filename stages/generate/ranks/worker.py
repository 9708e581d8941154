"""A rank of an engine: rank 0 is the engine's worker with a `Leader`, the others follow it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from pipeline.errors import ConfigError, RankLost
from pipeline.log.redis import RedisLog
from pipeline.names import rank_stage
from pipeline.process.priority import give_way
from pipeline.stage.slots import progress_reporter
from pipeline.stage.worker import EndAtOnce, Stop
from stages.generate.loop.worker import GIVES_WAY, LOAD_TIMEOUT_S, STEP_TIMEOUT_S, Loaded, run_engine
from stages.generate.model.checkpoint import check_folder, fingerprint
from stages.generate.model.ends import end_tokens
from stages.generate.model.spec import ModelSpec
from stages.generate.ranks.channel import LOOPBACK, TIMEOUT_S, Follower, Leader, least
from stages.generate.ranks.group import (
    Connect,
    RankSlot,
    RankWatch,
    Terms,
    ack,
    end_process,
    formation_of,
    formed,
    joined,
    terms_of,
)
from stages.generate.ranks.links import connect_links
from stages.generate.ranks.presence import start_of, wait_for_others, wait_until_single
from stages.generate.ranks.steps import FollowingEngine, leading_engine
from stages.generate.setup.config import GenerateConfig
from stages.generate.setup.loading import load_engine
from stages.generate.setup.resolve import Settings, resolve

logger = structlog.get_logger()

PATIENCE_S: Final = TIMEOUT_S + 10.0
"""Longest wait for a frame. It exceeds TIMEOUT_S, after which a rank without a frame ends by itself."""


def run(config: GenerateConfig, open_log: Callable[[], RedisLog], folder: Path) -> int:
    """Run one rank of an engine; return the exit code. Rank 0 ends at SIGTERM, the others with it.

    Raises:
        ConfigError: The model cannot be divided, or this rank differs from rank 0.
        RankLost: Another rank is gone.
    """
    rank, size, group = config.ranks.rank, config.engine.tp, config.nodes.group
    if not group or rank not in config.nodes.ranks_here(size):
        raise ConfigError(
            f"--slot: starts one process, but the {size} ranks of --tp {size} must start together (this one has --rank "
            f"{rank} and --group {group!r}); leave out --slot"
        )
    stop = Stop().on_signals()
    slot = RankSlot(open_log, rank, int(config.log.lease_s * 1000), config.worker.slot)
    slot.say(group=group, num_ranks=size, phase="starting")
    try:
        if config.nodes.nnodes > 1:
            wait_until_single(open_log(), slot, group, rank, config.nodes.node_rank, stop)
        return (_follow if rank else _lead)(config, open_log, folder, slot, stop)
    except RankLost as error:
        end_process(error)
        return 1
    finally:
        slot.leave()


def _resolved(config: GenerateConfig, folder: Path) -> tuple[ModelSpec, Settings, Terms]:
    """Return the model, the settings of this rank, and the terms that must be the same on all ranks."""
    spec = check_folder(folder, config.engine.loading)
    here = len(config.nodes.ranks_here(config.engine.tp))
    settings = resolve(config.engine, spec, config.ranks.rank, ranks_here=here, share=config.share)
    length = config.engine.max_seq_len or spec.max_positions  # a rank has no memory for longer requests
    common = f"{settings.of_all_ranks} length {length}"
    return spec, settings, terms_of(fingerprint(folder, dummy=config.engine.dummy_weight), common)


def _lead(config: GenerateConfig, open_log: Callable[[], RedisLog], folder: Path, slot: RankSlot, stop: Stop) -> int:
    group, size = config.nodes.group, config.engine.tp
    loading = EndAtOnce(slot.leave)
    _, _, terms = _resolved(config, folder)
    slot.say(phase="waiting", **asdict(terms))
    wait_for_others(open_log(), slot, group, size, terms.differ, stop)
    if stop:
        return 0
    with contextlib.ExitStack() as until_the_end:

        def load(config: GenerateConfig, folder: Path, report: Callable[[float], None]) -> Loaded:
            spec, settings, terms = _resolved(config, folder)
            owner, nonce = slot.owner(Stop()), secrets.token_hex(8)
            assert owner is not None
            others, connect, address = range(1, size), _connect(config, settings), config.nodes.rank_address
            slot.say(phase="waiting", detail=", ".join(map(rank_stage, others)))
            log = open_log()
            with formed(log, owner, group, size, terms, connect, nonce=nonce, address=address) as links:
                settings = settings.with_pages(least(links.frames, settings.num_pages, TIMEOUT_S))
            watch = RankWatch(open_log, start_of(group, nonce), others, end_process, loading=True)
            until_the_end.callback(watch.leave)
            slot.say(group=start_of(group, nonce), phase="loading", detail="weights")
            collectives = links.collectives()
            engine = load_engine(config, spec, folder, settings, report, collectives)
            _give_way(settings)
            least(links.frames, 0, LOAD_TIMEOUT_S)  # all have loaded
            loading.over()
            watch.all_have_loaded()
            slot.say(phase="ready", detail="")
            leader = Leader(links.frames, end_process, bodies=links.bodies)
            until_the_end.push(partial(_leave, leader))
            until_the_end.callback(watch.leave)  # before the others leave
            leading = leading_engine(engine, leader, collectives, spec.vocab_size, overlap=settings.overlap)
            return Loaded(leading, settings.with_fused(engine.fused), end_tokens(folder, spec))

        return run_engine(config, open_log, folder, load)


def _connect(config: GenerateConfig, settings: Settings) -> Connect:
    """Return a function that connects a rank with the others."""
    return partial(connect_links, device=settings.device, address=config.nodes.rank_address or LOOPBACK)


def _give_way(settings: Settings) -> None:
    if settings.device.type == "cpu":
        give_way(GIVES_WAY)


def _leave(leader: Leader, error: type[BaseException] | None, *_: object) -> None:
    """Let the others leave. After an error they may wait in a sum, and notice nothing until this process ends."""
    if error is None:
        with contextlib.suppress(RankLost):  # the lost rank wants to end, too
            leader.leave()


class _NodeEnds(Exception):
    """The ranks of this machine must end, and rank 0 is on another one."""


def _follow(config: GenerateConfig, open_log: Callable[[], RedisLog], folder: Path, slot: RankSlot, stop: Stop) -> int:
    rank, size, group = config.ranks.rank, config.engine.tp, config.nodes.group
    is_far = config.nodes.node_rank > 0
    loading = EndAtOnce(slot.leave)
    _, _, terms = _resolved(config, folder)
    slot.say(phase="waiting", detail=rank_stage(0), **asdict(terms))
    log = open_log()
    found = formation_of(log, slot, group, rank, terms, stop)
    if found is None:
        return 0
    owner, entry, formation = found
    structlog.contextvars.bind_contextvars(slot=owner.slot)
    spec, settings, _ = _resolved(config, folder)  # the wait may have been long: other memory is free now
    links = joined(formation, rank, _connect(config, settings))
    settings = settings.with_pages(least(links.frames, settings.num_pages, TIMEOUT_S))
    ack(log, owner, group, entry)
    start = start_of(group, formation.nonce)
    slot.say(group=start)
    slot.report_progress(LOAD_TIMEOUT_S)
    watch = RankWatch(open_log, start, [0], end_process, loading=True) if is_far else None
    report = progress_reporter(slot, "weights")
    engine = load_engine(config, spec, folder, settings, report, links.collectives())
    _give_way(settings)
    least(links.frames, 0, LOAD_TIMEOUT_S)
    loading.over()
    if watch is not None:
        watch.all_have_loaded()
    slot.say(phase="ready", detail="")

    def heard() -> None:
        slot.report_progress(STEP_TIMEOUT_S + PATIENCE_S)
        if is_far and stop:
            raise _NodeEnds

    following = FollowingEngine(engine, Follower(links.frames, bodies=links.bodies, heard=heard))
    logger.info("rank_follows", rank=rank, ranks=size, group=group)
    with contextlib.suppress(_NodeEnds):
        while following.follow():
            pass
    if watch is not None:
        watch.leave()
    return 0
