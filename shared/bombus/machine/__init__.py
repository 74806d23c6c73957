"""What every process needs from its machine: sockets and HTTP, keys, certificates, hardware, clean shutdown."""
