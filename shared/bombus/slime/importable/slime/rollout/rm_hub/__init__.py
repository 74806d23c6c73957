"""Names of `slime.rollout.rm_hub`."""

from bombus.slime.rewards import async_rm as async_rm
from bombus.slime.rewards import batched_async_rm as batched_async_rm
