"""The environment server: environments in slots, leased to one session each, over OpenEnv's wire."""
