"""Schemathesis makes requests of what /openapi.json says, sound ones and broken ones: nothing of it is our bug."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import Server, serve

from pipeline.names import STAGES

pytestmark = pytest.mark.slow

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
EXAMPLES = os.environ.get("SCHEMATHESIS_EXAMPLES", "100")
"""Of each route."""
QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 8}


def answer(server: Server) -> str:
    response = server.post(QUESTION)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def workers(server: Server) -> set[int]:
    """Return the process ids of all workers."""
    return {process.pid for stage in STAGES for process in server.command.workers(stage)}


@pytest.mark.timeout(900)
def test_whatever_the_document_allows_or_forbids_is_answered_and_breaks_nothing(llama3: Path, tmp_path: Path) -> None:
    with serve(tmp_path, "--model", str(llama3), "--dtype", "float32", "--max-seq-len", "64") as server:
        before = answer(server)
        workers = {
            process.pid
            for stage in ("tokenize", "generate", "detokenize", "web")
            for process in server.command.workers(stage)
        }
        run = subprocess.run(
            [
                str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json",
                "--checks", CHECKS, "--phases", "coverage,fuzzing", "--mode", "all",
                "--max-examples", EXAMPLES, "--generation-deterministic",
                "--request-timeout", "60", "--continue-on-failure", "--no-color",
            ],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=840,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
        assert len([line for line in server.command.log_lines("request") if line["status"] == 200]) > 50
        assert answer(server) == before
        assert workers == {
            process.pid
            for stage in ("tokenize", "generate", "detokenize", "web")
            for process in server.command.workers(stage)
        }, "no process ended"
