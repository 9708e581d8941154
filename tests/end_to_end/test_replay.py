"""`minisgl replay` beside a real server: shown, computed again on it, over HTTP, and in this process."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.checkpoints import TEXT, make_checkpoint
from support.kernel_variants import VARIANTS
from support.servers import Server, serve
from support.tool import Tool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("llama3_server"),
    pytest.mark.skipif(not VARIANTS, reason="torch alone promises no equal tokens"),
]
BODY = {
    "prompt": "The log is what happened. " * 8,  # more than one chunk
    "n": 2,
    "max_tokens": 24,
    "temperature": 1,
    "frequency_penalty": 1,
    "logit_bias": {"70": 3},
    "bad_words": ["the"],
    "logprobs": 2,
    "ignore_eos": True,
}


def test_answers_are_computed_again_on_the_server_over_http_and_here(
    llama3_server: Server, llama3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    response = httpx.post(f"{llama3_server.url}/v1/completions", json=BODY, timeout=60)
    assert response.status_code == 200, response.text
    uid, replay = response.headers["x-minisgl-uid"], Tool("replay", llama3_server.redis_url, capsys)
    here = ("--model", str(llama3), "--dtype", "float32", "--num-pages", "64", "--threads", "1")
    for where in ((), ("--cached",), ("--url", llama3_server.url), here):
        code, out, _ = replay.run("run", uid, "--times", "2", "--json", *where)
        told = [(each["uid"], each["identical"], each["tokens"]) for each in json.loads(out)]
        assert (code, told) == (0, [(f"{uid}.0", 2, 24), (f"{uid}.1", 2, 24)]), where
    for choice, index in zip(response.json()["choices"], (0, 1), strict=True):
        assert replay.json("show", f"{uid}.{index}")["text"] == choice["text"]


def test_the_steps_that_a_server_has_journalled_are_planned_again(
    llama3_server: Server, llama3_archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(number: int) -> str:
        body = BODY | {"prompt": f"{BODY['prompt']}{number}", "max_tokens": 24 + 8 * number, "n": 1 + number % 2}
        return httpx.post(f"{llama3_server.url}/v1/completions", json=body, timeout=60).headers["x-minisgl-uid"]

    replay = Tool("replay", llama3_server.redis_url, capsys)
    with ThreadPoolExecutor(6) as pool:
        uids = list(pool.map(ask, range(6)))
    shown = [
        replay.json("show", uid if number % 2 == 0 else f"{uid}.0", "--at", "1") for number, uid in enumerate(uids)
    ]
    first = min((each["epoch"], int(each["step"].partition("-")[2])) for each in shown)
    assert all(each["batch"]["rows"] > 0 and 0 < each["pages"]["free"] <= each["pages"]["all"] for each in shown)
    steps = ("schedule", shown[0]["engine"], "--from", "{}-{}".format(*first), "--archive", str(llama3_archive))
    again = replay.json(*steps, "--max-running-requests", "2", "--num-pages", str(shown[0]["pages"]["all"] // 2))
    assert again["identical"] and again["tokens"] >= 24 + 2 * 32 + 40 + 2 * 48 + 56 + 2 * 64 - len(uids)
    assert again["outcomes"]["estimated"]["tokens"] > 0


@pytest.mark.night  # a server of two ranks, and two more ranks in this process
def test_what_two_ranks_computed_is_identical_on_two_and_explained_by_their_number_on_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_checkpoint(tmp_path / "model", "llama3", dtype="bfloat16", max_positions=512)
    flags, body = ("--model", str(model), "--threads", "1"), {"max_tokens": 150, "temperature": 1, "ignore_eos": True}
    with serve(tmp_path, *flags, "--tp", "2") as server:
        bodies = [body | {"prompt": TEXT[20 * index :][:100], "seed": index} for index in range(8)]
        url = f"{server.url}/v1/completions"
        uids = [httpx.post(url, json=each, timeout=120).headers["x-minisgl-uid"] for each in bodies]

        replay = Tool("replay run", server.redis_url, capsys)
        code, out, _ = replay.run(*uids, "--json", *flags, "--tp", "2")
        assert [(each["identical"], each["tokens"]) for each in json.loads(out)] == [(1, 150)] * 8 and code == 0
        code, out, _ = replay.run(*uids, "--json", *flags, "--tp", "1")
        told = json.loads(out)
        differences = [found for each in told for found in each["differences"]]
        assert code == 1 and len(differences) == sum(1 - each["identical"] for each in told)
        assert all(found["explained_by"] == ["ranks: recorded ranks-2, now ranks-1"] for found in differences)
