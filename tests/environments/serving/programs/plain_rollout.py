"""A program for tests: plays one group with a plain function that never ends. Arguments: the server's URL."""

import sys
import threading

from bombus import EnvPool, Task
from bombus.environments.pools.blocking import BlockingEnvironment


def never_ends(task: Task, environment: BlockingEnvironment) -> None:
    environment.open(task)
    print("playing", flush=True)
    threading.Event().wait()


with EnvPool(sys.argv[1], size=1, group_size=1) as pool:
    pool.run_group(Task(), never_ends)
