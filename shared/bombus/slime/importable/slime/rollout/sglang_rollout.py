"""Names of `slime.rollout.sglang_rollout`."""

from bombus.slime.generation import GenerateState as GenerateState
from bombus.slime.generation import generate as generate
from bombus.slime.generation import get_model_url as get_model_url
