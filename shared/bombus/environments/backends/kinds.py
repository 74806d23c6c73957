"""What a backend is: a process or a folder that one environment at a time has to itself."""

from typing import NoReturn, Protocol

from bombus.errors import Code, Refused


class Backend(Protocol):
    """Something that an environment stands on, isolated from the others of its pool.

    `address` is how an environment reaches it: a URL, or a folder.
    """

    address: str

    async def start(self) -> None:
        """Start it, and return when it can be used. Raises `InfraError`."""
        ...

    async def is_healthy(self) -> bool:
        """Return whether it answers."""
        ...

    async def scrub(self) -> None:
        """Remove everything that an environment left in it. Raises `InfraError` when that is not certain."""
        ...

    async def stop(self) -> None:
        """End it, with all its processes. Stopping again does nothing."""
        ...


class RealBackend:
    """Tells a class to use the real service. The class gets this in place of a simulator."""

    @property
    def address(self) -> NoReturn:
        """Raise `Refused`, so that a class written for simulators does not mistake the real service for one."""
        raise Refused(
            Code.UNSUPPORTED,
            "this environment asks for the address of a simulator, and BACKEND_TYPE=aws gives it the real AWS: unset "
            "BACKEND_TYPE, or let the class compare its `backend` with bombus.environments.backends.kinds.REAL",
        )


REAL = RealBackend()
