"""Two releases of bombus, of which each process runs the one that is current when it starts."""

import os
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Run by Python in every process, before anything of bombus is imported.
CHOOSE = """
import sys
from pathlib import Path

here = Path(__file__).parent
release = (here / "current").resolve()
sys.path[:0] = [str(folder) for folder in (*release.glob("services/*"), release / "shared")]
with (here / "started").open("a") as file:
    print(release, *sys.orig_argv[2:4], file=file)
"""


class Releases:
    """Lets the processes of a hive run the code of this checkout and of the one at `other`, in turn."""

    def __init__(self, folder: Path, other: Path, seed: int) -> None:
        self._folder = folder / "releases"
        self._folder.mkdir()
        self._trees = {"this": ROOT, "other": other}
        self._random = random.Random(seed)
        (self._folder / "sitecustomize.py").write_text(CHOOSE)
        self.choose("other")

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables with which a process and its children run the current release."""
        return {"PYTHONPATH": os.pathsep.join([str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])])}

    def choose(self, name: str = "") -> None:
        """Make `name` ("this" or "other"; by default any) the release of all processes that start from now on."""
        following = self._folder / "following"
        following.symlink_to(self._trees[name or self._random.choice(list(self._trees))])
        following.replace(self._folder / "current")

    def started(self) -> dict[str, Counter[str]]:
        """Return how many processes of each service have run each release."""
        names = {str(tree): name for name, tree in self._trees.items()}
        found: dict[str, Counter[str]] = {name: Counter() for name in self._trees}
        for line in (self._folder / "started").read_text().splitlines():
            tree, *words = line.split(" ")
            if words[:1] == ["bombus"] and len(words) > 1:
                found[names[tree]][words[1]] += 1
        return found
