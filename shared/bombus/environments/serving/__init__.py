"""The environment server: environments in slots, each leased to one session, over OpenEnv's protocol."""
