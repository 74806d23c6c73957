"""The interface of a backend: a process or a folder that a single environment at a time has to itself."""

from typing import NoReturn, Protocol

from bombus.errors import Code, Refused


class Backend(Protocol):
    """The process or folder that an environment runs on, isolated from the other backends in its pool.

    `address` is where an environment reaches it: a URL or a path.
    """

    address: str

    async def start(self) -> None:
        """Start the backend, and return once it can be used. Raises `InfraError`."""
        ...

    async def is_healthy(self) -> bool:
        """Return whether the backend responds."""
        ...

    async def scrub(self) -> None:
        """Remove everything that an environment left in the backend. Raises `InfraError` if that cannot be ensured."""
        ...

    async def stop(self) -> None:
        """Stop the backend and all its processes. Stopping it again does nothing."""
        ...


class RealBackend:
    """Given to a class in place of a simulator, to tell the class to use the real service."""

    @property
    def address(self) -> NoReturn:
        """Raise `Refused`, so that a class written for simulators does not mistake the real service for a simulator."""
        raise Refused(
            Code.UNSUPPORTED,
            "this environment asks for a simulator's address, but BACKEND_TYPE=aws gives it the real AWS: unset "
            "BACKEND_TYPE, or have the class compare its `backend` with bombus.environments.backends.kinds.REAL",
        )


REAL = RealBackend()
