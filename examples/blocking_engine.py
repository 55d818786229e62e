"""An engine whose hooks are synchronous: it begins a load, goes on, and looks whether the load has come."""

import subprocess
import sys
import tempfile
import time

import lmlive
from lmlive.worker.blocking import BlockingScheduler, BlockingWorker

PROMPT = list(range(600))
BLOCKS, OTHERS = list(range(38)), list(range(64, 102))


def engine(url: str) -> None:
    """Store a prefix, find it again, and load it into other blocks while the engine does something else."""
    cache = lmlive.shared_empty((2, 128, 16, 2, 32), "float32")
    cache[:, BLOCKS] = 1.0
    with (
        BlockingWorker(url, kv_caches={"layer0": cache}, block_tokens=16, block_axis=1, model="tiny") as worker,
        BlockingScheduler(url, model="tiny") as scheduler,
    ):
        print(worker.store(PROMPT, BLOCKS))
        found = scheduler.lookup(PROMPT)

        loading = worker.submit_retrieve(PROMPT, OTHERS, lease=found.lease)
        steps = 0
        while not loading.done():  # it is, by its deadline and a quarter of a second, whatever becomes of the server
            steps += 1
            time.sleep(0.0005)  # a step for other requests
        loaded = loading.result()
        print(f"{loaded.reason} {loaded.tokens} tokens after {steps} steps")
        assert (loaded.reason, loaded.tokens) == ("loaded", 512)
        assert (cache[:, OTHERS[:32]] == 1.0).all()
        if not loaded.settled.wait(1.0):  # only of a load in doubt: then its blocks are kept off the free list
            print("not to be used:", worker.unsettled_blocks)


def main() -> None:
    """Run the example."""
    run_dir = tempfile.mkdtemp(prefix="lmlive-")
    command = [sys.executable, "-m", "lmlive.server", "--run-dir", run_dir, "--pool-bytes", "16MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()  # it serves
        try:
            engine(f"ipc://{run_dir}/router.sock")
        finally:
            server.terminate()


main()
