"""Schemathesis makes requests of what /openapi.json says, sound ones and broken ones: nothing of it is our bug."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers import Server, serve

from pipeline.names import STAGES

pytestmark = pytest.mark.slow

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
EXAMPLES = os.environ.get("SCHEMATHESIS_EXAMPLES", "100")
"""Of each route, at random."""
PHASES = "coverage,fuzzing"
"""`coverage` takes the bounds of every field of every route in turn: 5,600 requests."""
ENDLESS = "/v1/pipeline/events"
"""A stream that does not end by itself; `tests/web/routes/test_pipeline.py` has its answers."""
QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 8}


@pytest.fixture
def narrow_server(llama3: Path, tmp_path: Path) -> Iterator[Server]:
    """A server whose answers are short."""
    with serve(tmp_path, "--model", str(llama3), "--max-seq-len", "128") as server:
        yield server


def answer(server: Server) -> str:
    response = server.post(QUESTION)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def workers(server: Server) -> set[int]:
    """Return the process ids of all workers."""
    return {process.pid for stage in STAGES for process in server.command.workers(stage)}


def answered(server: Server) -> list[dict[str, Any]]:
    """Return the log lines of the requests that were answered."""
    return [line for line in server.command.log_lines("request") if line["status"] == 200]


@pytest.mark.night  # by day tests/web/routes/test_openapi.py has the document
@pytest.mark.timeout(900)
def test_whatever_the_document_allows_or_forbids_is_answered_and_breaks_nothing(
    narrow_server: Server, tmp_path: Path
) -> None:
    before, processes = answer(narrow_server), workers(narrow_server)
    num_answered = len(answered(narrow_server))
    run = subprocess.run(
        [
            str(Path(sys.executable).with_name("schemathesis")), "run", f"{narrow_server.url}/openapi.json",
            "--checks", CHECKS, "--phases", PHASES, "--mode", "all",
            "--exclude-path", ENDLESS, "--max-examples", EXAMPLES, "--generation-deterministic",
            "--request-timeout", "60", "--continue-on-failure", "--no-color",
        ],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=840,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert len(answered(narrow_server)) > num_answered + 50
    assert answer(narrow_server) == before
    assert workers(narrow_server) == processes, "no process ended"
