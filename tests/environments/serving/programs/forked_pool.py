"""A program for tests: uses a pool in a forked child, and then where it was opened. Arguments: the server's URL."""

import os
import sys

from bombus import EnvPool, Task
from bombus.environments.kinds import EnvironmentLost

with EnvPool(sys.argv[1], size=1, group_size=1) as pool:
    pool.reset_group(Task())
    child = os.fork()
    if not child:
        try:
            pool.run_group_step([{"tool": "add"}])
        except EnvironmentLost as error:
            print(error, flush=True)
        pool.close()
        os._exit(0)
    os.waitpid(child, 0)
    print(pool.run_group_step([{"tool": "add"}])[0], flush=True)
