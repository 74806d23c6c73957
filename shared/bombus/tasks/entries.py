"""reasoning-gym's entries, made in a separate process with a fixed hash seed.

Some generators choose from a set in its iteration order, which depends on each Python process's random hash seed. With
the hash seed fixed, the same seed and index give every program the same entry.
"""

import atexit
import contextlib
import os
import pickle
import subprocess
import sys
import threading
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from bombus.environments.kinds import ResetFailed
from bombus.errors import in_one_line
from bombus.tasks.kinds import SIZE_MAX

ENTRY_S = 120.0  # time limit for an entry; the slowest generator takes 6 s
END_S = 10.0
DATASETS_KEPT = 8
ENTRIES_KEPT = 4096
HASH_SEED = "0"
# With -P and our own folder last, no file in the working directory, such as random.py, is imported.
PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from bombus.tasks.entries import serve_entries; "
    "serve_entries(int(sys.argv[2]))"
)


class EntryMaker:
    """Makes entries in a separate process, which starts with the first entry and ends when this process does.

    Threads may share it.
    """

    def __init__(self) -> None:
        self._one = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def pickled_entry(self, generator: str, seed: int, index: int) -> bytes:
        """Return an entry as a pickle, because JSON would lose the tuples and sets that verifiers compare.

        Raises `ResetFailed` if the entry cannot be made.
        """
        what = f"entry {index} of reasoning_gym:{generator}"
        with self._one:
            try:
                connection = self._running()
                connection.send((generator, seed, index))
                if not connection.poll(ENTRY_S):
                    raise TimeoutError(f"it took longer than {ENTRY_S:g} s")
                entry, failure = connection.recv()
            except BaseException as error:  # including an interrupt: the next request would get this entry
                self._end()
                if isinstance(error, OSError | EOFError):
                    raise ResetFailed(f"{what} could not be made: {in_one_line(error)}") from error
                raise
        if failure:
            raise ResetFailed(f"{what} could not be made: {failure}")
        return bytes(entry)

    def close(self) -> None:
        """End the process. The next entry starts a new one."""
        with self._one:
            self._end()

    def _running(self) -> Connection:
        if self._connection is None:
            self._connection, theirs = Pipe()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", PROGRAM, str(Path(__file__).parents[2]), str(theirs.fileno())],
                    env={**os.environ, "PYTHONHASHSEED": HASH_SEED},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is meant for our program, which ends this process
                )
        return self._connection

    def _end(self) -> None:
        connection, self._connection = self._connection, None
        process, self._process = self._process, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait(END_S)


@lru_cache(DATASETS_KEPT)
def dataset_of(generator: str, seed: int, size: int = SIZE_MAX) -> Any:
    """Return a reasoning-gym data set. Some data sets make all entries immediately, which takes seconds for large
    sizes."""
    from reasoning_gym import create_dataset

    return create_dataset(generator, size=size, seed=seed)


@lru_cache(ENTRIES_KEPT)
def _kept(generator: str, seed: int, index: int) -> bytes:
    return _maker.pickled_entry(generator, seed, index)


def entry_of(generator: str, seed: int, index: int) -> dict[str, Any]:
    """Return an entry, which is the same in every process. Raises `ResetFailed` if it cannot be made."""
    entry: dict[str, Any] = pickle.loads(_kept(generator, seed, index))  # pickled by our own process
    return entry


def _answered(generator: str, seed: int, index: int) -> tuple[bytes, str]:
    try:
        return pickle.dumps(dataset_of(generator, seed)[index]), ""
    except Exception as error:  # an error raised by the generator's own code is reported to the caller
        return b"", in_one_line(error) or type(error).__name__


def serve_entries(descriptor: int) -> None:
    """Answer the requests on a connection until the requesting program has ended."""
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            connection.send(_answered(*connection.recv()))


def _make_anew() -> None:
    """Have a forked program start its own process. With a shared one, the programs would get each other's answers."""
    global _maker
    _maker = EntryMaker()


_maker = EntryMaker()
atexit.register(lambda: _maker.close())  # the current maker, which a fork may have replaced
os.register_at_fork(after_in_child=_make_anew)
