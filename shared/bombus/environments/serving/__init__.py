"""The environment server: worlds in slots, leased to one session each, over OpenEnv's wire."""
