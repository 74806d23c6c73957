"""One machine: its processes, hardware, environments and keys."""
