"""OpenEnv's messages, as sent by clients and servers. Pure."""
