"""Runs what `make images` built, without a container engine: each service in namespaces of its own.

A service runs as the image says: its user, environment, entry point and health check. Its root file system cannot be
written to; `/data` is a folder of the host, and `/tmp` is empty memory. It has the network of the host.
"""

import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.patience import wait_until

UID = 10001
# In a new mount namespace, in which nothing reaches the host: $0 is the root, $1 the folder for /data, the rest is run.
ENTER = """
set -eu
root=$0 data=$1
shift
mount --bind "$root" "$root"
mount -t tmpfs tmpfs "$root/tmp" -o mode=1777
mount --bind "$data" "$root/data"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount -o remount,bind,ro "$root"
exec chroot --userspec="$@"
"""


class Images:
    """The images that buildah keeps in `folder`, mounted one by one."""

    def __init__(self, folder: Path) -> None:
        self._program = ["buildah", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]

    def buildah(self, *words: str) -> str:
        return subprocess.run([*self._program, *words], capture_output=True, text=True, check=True).stdout.strip()

    @contextmanager
    def mounted(self, target: str) -> Iterator["Image"]:
        container = self.buildah("from", "--pull-never", f"localhost/bombus-{target}")
        try:
            described = json.loads(self.buildah("inspect", "--type", "image", f"localhost/bombus-{target}"))
            yield Image(target, Path(self.buildah("mount", container)), described["Docker"]["config"])
        finally:
            self.buildah("umount", container)
            self.buildah("rm", container)

    def size(self, name: str) -> int:
        """Return an image's size in bytes, with what is below it."""
        described = json.loads(self.buildah("images", "--json", name))
        number, unit = described[0]["size"].split()
        return round(float(number) * {"KB": 1e3, "MB": 1e6, "GB": 1e9}[unit])


class Image:
    """A mounted image: its files, and what it says how they are run."""

    def __init__(self, target: str, root: Path, config: dict[str, Any]) -> None:
        self.target, self.root, self.config = target, root, config

    @property
    def health_check(self) -> list[str]:
        return list(self.config["Healthcheck"]["Test"][1:])

    def command(self, data: Path, words: Sequence[str], variables: Sequence[str] = ()) -> list[str]:
        """Return the command that runs `words` in the image's file system, with its user and environment."""
        assert self.config["User"] == str(UID)
        environment = ["/usr/bin/env", "-i", "-C", self.config["WorkingDir"], *self.config["Env"], *variables]
        inside = [f"{UID}:{UID}", str(self.root), *environment, *words]
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER]
        return [*apart, str(self.root), str(data), *inside]

    def run(self, data: Path, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the image to its end."""
        return subprocess.run(self.command(data, words), capture_output=True, text=True, timeout=120)


class Service:
    """A service of an image that runs, with the log that it wrote."""

    def __init__(self, image: Image, data: Path, *words: str, variables: Sequence[str] = (), entry: str = "") -> None:
        """Start it with `words` after the image's entry point, or after another one."""
        self.image, self.data, self.words = image, data, words
        data.mkdir(exist_ok=True)
        os.chown(data, UID, UID)
        self.log = data.with_suffix(".log")
        entry_point = shlex.split(entry) or image.config["Entrypoint"]
        command = image.command(data, [*entry_point, *words], variables)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def first(self) -> psutil.Process:
        """Return the process that is number 1 in the service's namespace."""
        (found,) = psutil.Process(self.process.pid).children()
        return found

    def until_healthy(self, url: str) -> None:
        """Wait until the image's health check, with this URL instead of the default one, is content."""
        program = self.image.health_check[0]

        def healthy() -> bool:
            assert self.process.poll() is None, f"{shlex.join(self.words)} ended:\n{self.log.read_text()[-4000:]}"
            return self.image.run(self.data, program, url).returncode == 0

        wait_until(healthy, 120)

    def stop(self) -> int:
        """Send SIGTERM as `docker stop` does, to the first process alone. Returns the exit code."""
        if self.process.poll() is None:
            self.first.terminate()
        return self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
