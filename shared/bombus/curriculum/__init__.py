"""Chooses the next task: tiers of tasks that a policy masters one after another, and samplers that draw from them."""
