"""Names of `slime.rollout.filter_hub.base_types`."""

from bombus.slime.filters import DynamicFilterOutput as DynamicFilterOutput
