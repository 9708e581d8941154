"""`minisgl bench`: what cannot work is refused in one line, before anything is measured."""

from __future__ import annotations

import sys

import pytest

import minisgl


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("nothing", "nothing given, expected one of offline, serve, pipeline, compare, tail, speculate, cost, gpu"),
        ("offline --input-len 10-5", "'10-5': must be MIN-MAX with 1 <= MIN <= MAX, or one number"),
        ("offline --output-len few", "'few': must be MIN-MAX"),
        ("offline --num-prompts 0", "'0': must be a whole number of at least 1"),
        ("offline --preset huge", "'huge': must be one of auto, small, nano"),
        ("offline --output /no/such/folder/out.json", "--output /no/such/folder/out.json"),
        ("offline --port 80", "unrecognized arguments: --port"),
        ("offline --tp 2", "--tp 2: this benchmark measures a single process"),
        ("serve --url localhost:1919", "--url localhost:1919: must begin with http://"),
        ("serve --url http://me:secret@host", "--url: has a password, which the outputs would show; pass --api-key"),
        ("serve --rate 2 --concurrency 4", "--rate 2 and --concurrency 4: pass one of them"),
        ("serve --turns 3", "--turns is not used by --dataset random, only by multi-turn"),
        ("serve --dataset multi-turn --groups 2", "--groups is not used by --dataset multi-turn"),
        ("serve --dataset qwen", "--dataset qwen needs a file: pass --trace FILE"),
        ("serve --dataset qwen --trace t --input-len 5", "--input-len is not used by --dataset qwen"),
        ("serve --dataset qwen --trace t --trace-scale 2 --rate 1", "which --rate and --concurrency"),
        ("serve --dataset mooncake --trace absent", "--trace absent: No such file or directory"),
        ("serve --output-len 0", "'0': must be MIN-MAX"),
        ("serve --goodput speed:3", "'speed:3': must be ttft:MS, tpot:MS or e2e:MS"),
        ("serve --goodput ttft:fast", "'ttft:fast': must be"),
        ("serve --rate 0", "'0': must be a number above 0"),
        ("serve --temperature 3", "'3': must be a number from 0 to 2"),
        ("serve --output absent/out.json", "--output absent/out.json: not a file in a folder that exists"),
        ("serve --plot plot.txt", "--plot plot.txt: must end in .png"),
        ("serve --dataset sharegpt", "'sharegpt': must be one of random, shared-prefix"),
        ("pipeline --redis-url unix:///nothing.sock", "cannot be reached"),
        ("pipeline --output absent/figures.json", "make the folder"),
        ("pipeline --rows 0", "at least 1"),
        ("compare --model absent", "--model absent: no checkpoint; pass a folder, or 95m or 0.6b"),
        ("compare --peer-url localhost:1", "--peer-url localhost:1: must begin with http://"),
        ("compare --llama-python /nowhere", "--llama-python /nowhere: no such program; pass the python of"),
        (
            f"compare --llama-python {sys.executable}",
            "has no llama.cpp (ModuleNotFoundError: No module named 'llama_cpp'); run",
        ),
        ("compare --llama-python x --peer-url http://h", "--peer-url and --llama-python both name the peer; pass one"),
        ("compare --llama-python x --gguf absent", "--gguf absent: no such file; pass a GGUF file, or bf16 or q8_0"),
        ("compare --gguf q8_0", "--gguf q8_0: is for llama.cpp; pass --llama-python, too"),
        ("compare --both", "--both: is for llama.cpp; pass --llama-python, too"),
        ("compare --output absent/x.json", "--output absent/x.json: not a file in a folder that exists"),
        ("tail --model absent", "--model absent: no checkpoint; pass a folder, or 95m or 0.6b"),
        ("tail --runs 0", "must be a whole number of at least 1"),
        ("tail --output absent/x.json", "--output absent/x.json: not a file in a folder that exists"),
        ("cost --of tea", "'tea': must be one of journal, archive"),
        ("cost --model absent", "--model absent: no checkpoint; pass a folder, or 95m or 0.6b"),
        ("gpu --only models,kernels", "'kernels': no such group; expected some of attention,models"),
        ("gpu --budget 0", "must be a number of seconds above 0"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(command: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert minisgl.main(["bench", *command.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("minisgl: ") and printed.err.count("\n") == 1
    assert says in printed.err and "secret" not in printed.err
