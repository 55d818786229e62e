"""Host the server inside an asyncio program, and keep state of your own in step with it."""

import asyncio
import tempfile

import lmlive


class RopeTables(lmlive.InstanceLivenessTarget):
    """State that the program keeps for each worker; it must go when the worker goes."""

    def __init__(self) -> None:
        self.tables: dict[int, str] = {}

    def drop_instance_state(self, instance_id: int) -> None:
        """Forget one worker: called once for each registration that ends, on the loop."""
        self.tables.pop(instance_id, None)


async def main() -> None:
    """Run the example."""
    ropes = RopeTables()
    config = lmlive.ServerConfig(run_dir=tempfile.mkdtemp(prefix="lmlive-"), pool_bytes="16MiB")
    async with lmlive.LivenessServer(config, targets=[ropes]) as server:
        # The program's own work goes on here; the server shares the loop and never blocks it.
        async with lmlive.Worker(server.url, kv_caches={}, block_tokens=16, model="tiny") as worker:
            ropes.tables[worker.instance_id] = "tables of this worker"
            await worker.ping()
            print(server.status().liveness.tracked_instances, "instance, state", len(ropes.tables))
        print("after the worker left:", len(ropes.tables))
        assert not ropes.tables


asyncio.run(main())
