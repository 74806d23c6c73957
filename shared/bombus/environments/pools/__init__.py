"""The client side of environment servers: one session, and pools of them. Needs the extra `environments`."""
