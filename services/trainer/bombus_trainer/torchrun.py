"""`python -m bombus_trainer.torchrun`: run torchrun with the same arguments, and end when the supervisor ends."""

import os
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main

from bombus.machine.process import PARENT_VARIABLE, die_with_parent

if __name__ == "__main__":
    die_with_parent()
    os.environ.pop(PARENT_VARIABLE, None)  # the ranks' parent is this process, not the supervisor
    try:
        main()
    except SignalException as stopped:  # torchrun has ended its ranks
        sys.exit(128 + stopped.sigval)
