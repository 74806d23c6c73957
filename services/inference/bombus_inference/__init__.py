"""The inference replica: serves one engine's policy over HTTP, with weights that follow the log."""
