"""API keys of a whole server: they let in, they last through a restart, and nobody sees them."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest
from support.redis_servers import command
from support.servers import Server, eventually, is_alive, serve, wait_until_ready

from pipeline.names import WEB
from web.http.keys import hash_of

# By day tests/web/http/test_keys.py tests who is let in, and tests/ops/serve/test_config.py what a command line shows.
pytestmark = [pytest.mark.slow, pytest.mark.night]

KEYS = ("sk-first-8f3a6b", "sk-second-5c7d2e")
LIMITED = "sk-limited-1b9e4f"
ADMIN = "sk-admin-7d2c4a"
BODY = {"prompt": "Hello!", "max_tokens": 2}


def status(server: Server, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return server.post(BODY, headers=headers).status_code


def files_with(folder: Path, text: str) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return [str(path) for path in paths if text.encode() in path.read_bytes()]


def test_keys_let_in_last_through_a_restart_and_are_nowhere_to_be_seen(tmp_path: Path) -> None:
    """Keys of the command line are taken out of it: by then everything is as if they came by the environment."""
    limits = tmp_path / "limits.toml"
    limits.write_text(f'[[key]]\nkey = "{LIMITED}"\nconcurrent_requests = 1\n')
    flags = ("--limits", str(limits), "--api-key", *KEYS, "--admin-key", ADMIN)
    with serve(tmp_path / "here", *flags) as server:
        for is_killed in (True, False):
            keys = (*KEYS, LIMITED, ADMIN, "", "sk-wrong")
            assert [status(server, key) for key in keys] == [200, 200, 200, 200, 401, 401]
            assert httpx.get(f"{server.url}/v1/models").status_code == 401
            for process in server.command.processes()[1:]:  # all but the command itself, which was given them
                if process not in server.command.workers(WEB):
                    assert not {"MINISGL_API_KEY", "MINISGL_ADMIN_KEY"} & process.environ().keys(), process.cmdline()
            (worker,) = server.command.workers(WEB)
            assert set(KEYS) <= set(worker.environ()["MINISGL_API_KEY"].split())
            assert worker.environ()["MINISGL_ADMIN_KEY"] == ADMIN
            if is_killed:
                worker.send_signal(signal.SIGKILL)
                eventually(lambda worker=worker: not is_alive(worker), "the frontend's end")  # type: ignore[misc]
                wait_until_ready(server.url, [server.command])
        there = command(server.redis_url, "KEYS", "*")
        assert any(hash_of(LIMITED).encode() in key for key in there)
        lines = [" ".join(process.cmdline()) for process in server.command.processes()]
        assert len(lines) >= 5
        for key in (*KEYS, LIMITED, ADMIN):
            assert not any(key in line for line in lines)
            assert key not in server.command.output
            assert all(
                key.encode() not in part for name in there for part in (name, command(server.redis_url, "DUMP", name))
            )
            assert files_with(tmp_path / "here", key) == []  # what Redis wrote, and what everybody said
