"""OpenEnv's messages, as clients and servers send them. Pure."""
