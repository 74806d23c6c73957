"""A process that carries out commands of the AWS command line, one after another, in which it is imported once.

Reads `{"words": [...]}` in lines from its input, and writes `[exit code, output]` for each. It ends with its input.
"""

import io
import resource
import sys
from contextlib import redirect_stderr, redirect_stdout

import msgspec

OUTPUT_CHARACTERS_MAX = 256 * 1024
CUT = "\n(the output was cut)"
MEMORY_BYTES_MAX = 2 << 30
FILE_BYTES_MAX = 64 << 20


class WorkerRequest(msgspec.Struct):
    words: list[str]


class TextOutput(io.TextIOWrapper):
    """A stream of text over bytes in memory, since some commands write bytes."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors="replace", write_through=True)

    def text(self) -> str:
        """Return what was written, up to a limit."""
        self.seek(0)
        text = self.read(OUTPUT_CHARACTERS_MAX)
        return text + CUT if self.read(1) else text


def _limit() -> None:
    """Set limits to this process, so that a query whose result grows without end does no harm."""
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, FILE_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    from awscli.clidriver import create_clidriver  # only here is it installed for certain

    _limit()
    driver = create_clidriver()
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    sys.stdin = io.TextIOWrapper(io.BytesIO())  # for commands that read it
    for line in iter(requests.readline, b""):
        words = msgspec.json.decode(line, type=WorkerRequest).words
        output = TextOutput()
        with redirect_stdout(output), redirect_stderr(output):
            try:
                code = driver.main(words)
            except SystemExit as done:
                code = done.code if isinstance(done.code, int) else 255
        replies.write(msgspec.json.encode((code or 0, output.text())) + b"\n")
        replies.flush()


if __name__ == "__main__":
    main()
