"""SwanLab: files of its mode `offline`, which `swanlab sync` uploads."""

import shutil
import threading
from pathlib import Path
from typing import ClassVar

from bombus.insight.trackers.rows import Row, TrackedRun, plain_metrics, text_of

_ONE_AT_A_TIME = threading.Lock()  # a process can have one run of SwanLab


class SwanLab:
    """Nothing can be continued without SwanLab's server: a new process begins a new folder, and what a killed one had
    not written yet is lost. So the earlier folder is removed, and the run written anew from its first step."""

    package: ClassVar[str] = "swanlab"
    continues = False

    def open(self, run: TrackedRun, folder: Path) -> int:
        import swanlab

        self._swanlab = swanlab
        _ONE_AT_A_TIME.acquire()
        try:
            shutil.rmtree(folder / "swanlab", ignore_errors=True)
            (folder / "swanlab").mkdir()
            nothing = dict.fromkeys(("hardware", "runtime", "requirements", "git", "monitor"), False)
            swanlab.init(
                project=run.project,
                name=run.name,
                mode="offline",
                log_dir=str(folder / "swanlab"),
                config={**run.config, **run.tags},
                tags=[f"{name}={value}"[:50] for name, value in run.tags.items()],
                settings=swanlab.Settings(interactive=False, probe=nothing, terminal={"proxy_type": "none"}),
            )
        except BaseException:
            _ONE_AT_A_TIME.release()
            raise
        return 0

    def write(self, row: Row) -> None:
        values = dict[str, object](plain_metrics(row.metrics))
        if row.samples:
            values["samples"] = [self._swanlab.Text(text_of(each)) for each in row.samples]
        self._swanlab.log(values, step=row.step)

    def close(self) -> None:
        try:
            self._swanlab.finish()
        finally:
            _ONE_AT_A_TIME.release()
