"""What any process needs of its machine: sockets and HTTP, keys, certificates, hardware, a clean end."""
