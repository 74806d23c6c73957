"""Fetches the chat templates in the source packages of llama-cpp-python and vLLM: `python -m tests.templates.sources`.

They are others' work, under the licences of their models. So they are fetched for a test and kept in no repository.
"""

import hashlib
import io
import sys
import tarfile
from pathlib import Path, PurePath
from typing import NamedTuple
from urllib.request import urlopen


class Source(NamedTuple):
    """A source package, and which of its files are templates of chats."""

    url: str
    sha256: str
    pattern: str


FILES = "https://files.pythonhosted.org/packages"
SOURCES = {
    "llama-cpp-python": Source(
        f"{FILES}/ec/e9/e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3/llama_cpp_python-0.3.36.tar.gz",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        "*/vendor/llama.cpp/models/templates/*.jinja",
    ),
    "vllm": Source(
        f"{FILES}/f7/25/aa5684e9c59d6fc75f78926b7f15e8d9adc7de2d9e6e7575b80776ad8169/vllm-0.33.0.tar.gz",
        "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
        "vllm-*/examples/*.jinja",
    ),
}


def folder_of(name: str) -> Path:
    """Return where the templates of a source lie: in the environment that runs this."""
    return Path(sys.prefix) / "templates" / name


def fetch(name: str, source: Source) -> int:
    """Write the templates of a source into its folder, and return how many there are."""
    with urlopen(source.url) as answer:
        data = answer.read()
    if hashlib.sha256(data).hexdigest() != source.sha256:
        raise SystemExit(f"{source.url} is another file than the one that was pinned")
    folder = folder_of(name)
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    with tarfile.open(fileobj=io.BytesIO(data)) as package:
        for member in package:
            found = package.extractfile(member) if PurePath(member.name).match(source.pattern) else None
            if found is not None:
                (folder / PurePath(member.name).name).write_bytes(found.read())
                count += 1
    return count


if __name__ == "__main__":
    for name, source in SOURCES.items():
        print(f"{fetch(name, source)} templates of {name}")
