"""ops/slurm.sh and ops/skypilot.yaml: what they start is a command line that MiniSGL takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.generated_docs import ROOT

from ops.serve.config import ServerConfig, parse_command
from pipeline.log.config import LogConfig
from stages.generate.setup.config import GenerateConfig, NodesConfig
from web.config import WebStageConfig

SCRIPT = ROOT / "ops" / "slurm.sh"
SERVICE = yaml.safe_load((ROOT / "ops" / "skypilot.yaml").read_text())
URL = "redis://10.0.0.1:6379/0?password_file=/home/me/password"
NOTE = f"""#!{sys.executable}
import json, os, sys, time
url = os.environ.get("MINISGL_REDIS_URL", "")
with open("started", "a") as file:
    file.write(json.dumps([sys.argv[1:], url]) + "\\n")
while sys.argv[2] != "generate" and len(open("started").readlines()) < 3:
    time.sleep(0.01)
"""
"""A `minisgl` that notes how it was started. The log job ends when one of its three stages does."""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@"; done
"""


def started(folder: Path, *role: str, nodes: int = 1) -> list[tuple[list[str], str]]:
    """Return the command lines of `minisgl`, each with the URL of Redis, that a job starts. Others run the nodes."""
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in {"minisgl": NOTE, "srun": SRUN}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    environment = os.environ | {"SLURM_NNODES": str(nodes), "SLURM_JOB_ID": "7", "MINISGL_REDIS_URL": URL}
    environment["MINISGL_DATA_DIR"] = str(folder)
    subprocess.run(["bash", str(SCRIPT), *role], cwd=folder, env=environment, check=True, timeout=60)
    return [tuple(json.loads(line)) for line in (folder / "started").read_text().splitlines()]


def test_the_log_job_starts_all_stages_but_engines(tmp_path: Path) -> None:
    lines = started(tmp_path, "log", "--port", "80")
    configs = [parse_command(line, {"MINISGL_REDIS_URL": url}) for line, url in lines]
    assert all(config.log == LogConfig(redis_url=URL) for config in configs)
    assert {type(config).__name__ for config in configs} == {"WebStageConfig", "TokenizeConfig", "DetokenizeConfig"}
    assert [config.web.port for config in configs if isinstance(config, WebStageConfig)] == [80]


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_machines_of_an_engine_job_find_each_other(tmp_path: Path, nodes: int) -> None:
    lines = started(tmp_path, "engine", "--tp", "4", nodes=nodes)
    configs = [parse_command(line, {"MINISGL_REDIS_URL": url}) for line, url in lines]
    assert all(isinstance(config, GenerateConfig) and config.engine.tp == 4 for config in configs)
    several = [NodesConfig(2, 0, "7", ""), NodesConfig(2, 1, "7", "")]
    assert [config.nodes for config in configs if isinstance(config, GenerateConfig)] == (
        several if nodes == 2 else [NodesConfig()]
    )


def test_skypilot_serves_its_port_and_asks_whether_it_is_ready() -> None:
    environment = SERVICE["envs"] | dict.fromkeys(SERVICE["secrets"], "secret")
    echo = SERVICE["run"].replace("exec ~/minisgl/bin/minisgl", "printf '%s\\n'")
    ran = subprocess.run(["bash", "-euc", echo], env=environment, capture_output=True, text=True, check=True)
    config = parse_command(ran.stdout.split(), {})
    assert isinstance(config, ServerConfig)
    assert config.model.model == environment["MODEL"]
    assert (config.web.host, config.web.port) == ("0.0.0.0", SERVICE["resources"]["ports"])
    assert SERVICE["service"]["readiness_probe"]["path"] == "/ready"


@pytest.mark.parametrize("script", [SCRIPT.read_text(), SERVICE["setup"], SERVICE["run"]])
def test_scripts_have_no_wrong_syntax(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
