"""The inference replica: serves the policy of one engine over HTTP, with weights that follow the log."""
