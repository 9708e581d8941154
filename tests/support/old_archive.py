"""Files of an archive as versions before 0.2 wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import zstandard

from pipeline.archive.volume import place_of
from pipeline.recording import Recording, encode_recording


def written_as_before(folder: Path, name: str, batches: Sequence[Sequence[Recording]]) -> list[Path]:
    """Write a frame for each of *batches*, and the index; return both files, the index first."""
    frames, index = folder / f"{name}.zst", folder / f"{name}.index"
    content, lines = b"", b""
    for batch in batches:
        frame = zstandard.ZstdCompressor(write_checksum=True).compress(b"".join(map(encode_recording, batch)))
        for uid, made_ms, ended_ms in map(place_of, batch):
            lines += f"{uid} {made_ms} {ended_ms} {len(content)} {len(frame)}\n".encode()
        content += frame
    frames.write_bytes(content)
    index.write_bytes(lines)
    return [index, frames]
