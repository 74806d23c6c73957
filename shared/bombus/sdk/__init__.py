"""The client of a hive: `SwarmClient` and `AsyncSwarmClient` over one core. Needs httpx, msgspec and pydantic."""
