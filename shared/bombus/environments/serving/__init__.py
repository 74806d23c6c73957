"""The environment server: it runs environments in slots, each leased to one session, and speaks OpenEnv's protocol."""
