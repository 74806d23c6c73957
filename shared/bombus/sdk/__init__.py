"""The client of a hive: `SwarmClient` and `AsyncSwarmClient`, built on one core. Needs httpx, msgspec and pydantic."""
