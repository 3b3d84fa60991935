// Terminates a worker while its agent's thread stalls in NIXL for longer than the termination
// waits, with taken-over tables in its queue.
import { setTimeout as sleep } from "node:timers/promises";
import { isMainThread, parentPort, Worker } from "node:worker_threads";
import { nixlTransport } from "@kv/nixl";

const MILLION = 1_000_000;

if (isMainThread) {
  const worker = new Worker(new URL(import.meta.url));
  await new Promise((resolve) => worker.once("message", resolve));
  await worker.terminate();
  // Meanwhile the thread continues, and its tables are gone.
  await sleep(Number(process.env["FAKE_NIXL_STALL_METADATA"]));
  process.stdout.write("terminated");
} else {
  const agent = await nixlTransport({
    library: process.env["FAKE_NIXL"] ?? "",
    backends: ["UCX"],
  }).createAgent();
  const first = agent.localMetadata();
  // The thread takes the commands that arrive while it stalls as one batch: it stalls again, then
  // reads the tables.
  void agent.localMetadata();
  for (let table = 0; table < 4; table++) {
    const rows = new Float64Array(5 * MILLION).fill(1);
    void agent.prepareLocal({ memoryType: "DRAM", rows, takeRows: true });
  }
  await first;
  parentPort?.postMessage("stalled");
  setInterval(() => {}, 1000);
}
