"""The faults, their rates and their counts. Each seed draws which faults it has at all (swarm testing)."""

import random
from collections import Counter
from enum import StrEnum


class Fault(StrEnum):
    KILL = "a process is killed"
    STOP = "a process is stopped for a while"
    PARTITION = "a process is cut off from the bus"
    OUTAGE = "the bus is down"
    LOST_REQUEST = "a message never reaches the bus"
    LOST_ACK = "a message is stored, its acknowledgement is lost"
    LATE = "a message reaches the bus long after its sender gave up"
    LOST_REPLY = "an answer on core NATS is lost"
    LOST_RESPONSE = "a client's connection to its gateway breaks"
    LEASE = "the lease is deleted under its holder"
    CLOCK = "the server's clock jumps"
    SLOW = "a reader falls behind"
    FULL = "a stream is full"
    DAMAGE = "a snapshot is damaged"
    REPEAT = "a client repeats an answered request"
    VANISH = "a client forgets everything"
    ZOMBIE = "a second trainer takes the run"
    BROKEN_STEP = "a step fails"
    LOST_CHECKPOINT = "the newest checkpoint is damaged"
    FAILED_LOAD = "a trainer cannot load the model"
    NO_MOUNT = "a replica does not see the weights"


PER_MESSAGE = {Fault.LOST_REQUEST, Fault.LOST_ACK, Fault.LATE, Fault.LOST_REPLY, Fault.LOST_RESPONSE, Fault.SLOW}
PER_ACT = {Fault.REPEAT, Fault.BROKEN_STEP, Fault.FAILED_LOAD}  # drawn at each act that can fail in this way
SCHEDULED = tuple(fault for fault in Fault if fault not in PER_MESSAGE | PER_ACT)


class Faults:
    """`rates` are probabilities per message or act, or for scheduled faults times per second; 0 is off."""

    def __init__(self, pick: random.Random) -> None:
        self.on = True
        self.counts: Counter[Fault] = Counter()
        self._random = pick
        follows = {Fault.FAILED_LOAD: Fault.BROKEN_STEP, Fault.NO_MOUNT: Fault.PARTITION}
        drawn = [fault for fault in Fault if fault not in follows]
        self.rates: dict[Fault, float] = {fault: self._rate(fault) if pick.random() < 0.5 else 0.0 for fault in drawn}
        self.rates |= {fault: self.rates[other] for fault, other in follows.items()}

    def _rate(self, fault: Fault) -> float:
        if fault in PER_MESSAGE:
            return self._random.choice((0.005, 0.02, 0.1))
        if fault in PER_ACT:
            return self._random.choice((0.05, 0.3))
        return self._random.choice((0.05, 0.1, 0.3))

    def strikes(self, fault: Fault) -> bool:
        """Return whether this message or act fails."""
        rate = self.rates[fault]
        if not rate or not self.on or self._random.random() >= rate:
            return False
        self.counts[fault] += 1
        return True
