"""A program that runs in a new network namespace with only a loopback device: loopback.py PORT SOCKET.

It brings up the loopback device, listens on the port, and sends the listening socket to the process outside through
SOCKET, a file descriptor. Connections to the port in the namespace then reach the process outside.
"""

import fcntl
import socket
import struct
import sys

HOST = "127.0.0.1"
BACKLOG = 128
_REQUEST = "16sh22x"  # Linux's ifreq: the device's name and flags
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1


def main() -> None:
    port, descriptor = int(sys.argv[1]), int(sys.argv[2])
    with socket.socket() as any_socket:
        found = fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack(_REQUEST, b"lo", 0))
        _, flags = struct.unpack(_REQUEST, found)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack(_REQUEST, b"lo", flags | _UP))
    with socket.socket() as listening, socket.socket(fileno=descriptor) as outside:
        listening.bind((HOST, port))
        listening.listen(BACKLOG)
        socket.send_fds(outside, [b"."], [listening.fileno()])


if __name__ == "__main__":
    main()
