"""The client side of environment servers: single sessions and pools of them. Needs the extra `environments`."""
