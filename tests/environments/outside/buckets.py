"""An environment on a simulator of AWS, for the tests of `bombus env serve --backend ministack`."""

import httpx

from bombus import Task
from bombus.environments.backends.kinds import Backend
from bombus.environments.plain.marks import reward


class Bucket:
    """Puts a file into a bucket of its own account."""

    def __init__(self, backend: Backend) -> None:
        self._http = httpx.AsyncClient(base_url=backend.address)

    async def reset(self, task: Task) -> str:
        (await self._http.put("/same-bucket")).raise_for_status()
        return f"Put the file {task.metadata['name']} into the bucket."

    async def put(self, name: str, text: str) -> str:
        """Put a file into the bucket, and list the bucket."""
        (await self._http.put(f"/same-bucket/{name}", content=text)).raise_for_status()
        return (await self._http.get("/same-bucket")).text

    @reward
    async def is_there(self, task: Task) -> float:
        return float((await self._http.get(f"/same-bucket/{task.metadata['name']}")).status_code == 200)

    async def close(self) -> None:
        await self._http.aclose()
