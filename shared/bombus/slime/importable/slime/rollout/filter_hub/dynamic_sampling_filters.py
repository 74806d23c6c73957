"""Names of `slime.rollout.filter_hub.dynamic_sampling_filters`."""

from bombus.slime.filters import check_reward_nonzero_std as check_reward_nonzero_std
from bombus.slime.filters import check_reward_nonzero_std_with_fallback as check_reward_nonzero_std_with_fallback
