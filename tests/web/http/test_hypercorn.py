"""What we use of Hypercorn, which any version must have: these names, in one file, and nothing of it is written to."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import hypercorn.config

ROOT = Path(__file__).parents[3]
ROOMS = ("minisgl.py", "pipeline", "stages", "web", "ops")
ONLY = "web/http/asgi.py"
USED = {
    "hypercorn.app_wrappers.ASGIWrapper": "app",
    "hypercorn.asyncio.task_group.TaskGroup": "loop",
    "hypercorn.asyncio.worker_context.WorkerContext": "max_requests",
    "hypercorn.config.Config": "",
    "hypercorn.protocol.events.Body": "stream_id data",
    "hypercorn.protocol.events.EndBody": "stream_id",
    "hypercorn.protocol.events.Event": "stream_id",
    "hypercorn.protocol.events.Request": "stream_id headers http_version method raw_path state",
    "hypercorn.protocol.events.Response": "stream_id headers status_code",
    "hypercorn.protocol.events.StreamClosed": "stream_id",
    "hypercorn.protocol.http_stream.HTTPStream": "app config context task_group ssl client server send stream_id",
    "hypercorn.typing.ASGIReceiveCallable": None,  # for annotations
    "hypercorn.typing.ASGISendCallable": None,
    "hypercorn.typing.ConnectionState": None,  # a dict
}
"""Name -> its arguments."""
METHODS = {
    "hypercorn.app_wrappers.ASGIWrapper": "__call__",
    "hypercorn.asyncio.task_group.TaskGroup": "__aenter__ __aexit__ spawn spawn_app",
    "hypercorn.config.Config": "response_headers",
    "hypercorn.protocol.http_stream.HTTPStream": "handle app_send",
}
SETTINGS = ("include_server_header", "accesslog", "errorlog", "max_app_queue_size")


def imports(path: Path) -> Iterator[str]:
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "hypercorn" in text else ():
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_one_file_uses_hypercorn_and_only_these_names_of_it() -> None:
    found = {}
    for room in ROOMS:
        for path in [ROOT / room] if room.endswith(".py") else (ROOT / room).rglob("*.py"):
            if names := {name for name in imports(path) if name.startswith("hypercorn")}:
                found[path.relative_to(ROOT).as_posix()] = names
    assert found == {ONLY: set(USED)}


def test_the_names_take_what_we_pass() -> None:
    for name, expected in USED.items():
        module, _, own = name.rpartition(".")
        used = getattr(importlib.import_module(module), own)
        if expected is not None:
            taken = [key for key, one in inspect.signature(used).parameters.items() if one.default is one.empty]
            assert taken == expected.split(), name
        for method in METHODS.get(name, "").split():
            assert callable(getattr(used, method)), (name, method)


def test_the_settings_exist() -> None:
    config = hypercorn.config.Config()
    assert all(hasattr(config, name) for name in SETTINGS)
