"""A process that runs AWS CLI commands one after another, so that the CLI is imported only once.

It reads one `{"words": [...]}` per line from its input, and writes an `[exit code, output]` line for each. It ends when
its input ends.
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
    """A text stream that writes to bytes in memory, since some commands write bytes."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors="replace", write_through=True)

    def text(self) -> str:
        """Return the text written, up to a limit."""
        self.seek(0)
        text = self.read(OUTPUT_CHARACTERS_MAX)
        return text + CUT if self.read(1) else text


def _limit() -> None:
    """Limit the resources of this process, so that a query with an endlessly growing result does no harm."""
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, FILE_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    from awscli.clidriver import create_clidriver  # awscli is certain to be installed only in this process

    _limit()
    driver = create_clidriver()
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    sys.stdin = io.TextIOWrapper(io.BytesIO())  # an empty input, for commands that read it
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
