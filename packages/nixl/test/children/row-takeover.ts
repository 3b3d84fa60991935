// A worker is terminated whose agent's thread stalls within NIXL for longer than the end waits, with tables behind it that were taken over.
import { setTimeout as sleep } from "node:timers/promises";
import { isMainThread, parentPort, Worker } from "node:worker_threads";
import { nixlTransport } from "@kv/nixl";

const MILLION = 1_000_000;

if (isMainThread) {
  const worker = new Worker(new URL(import.meta.url));
  await new Promise((resolve) => worker.once("message", resolve));
  await worker.terminate();
  // The thread goes on meanwhile, and finds its tables gone.
  await sleep(Number(process.env["FAKE_NIXL_STALL_METADATA"]));
  process.stdout.write("terminated");
} else {
  const agent = await nixlTransport({
    library: process.env["FAKE_NIXL"] ?? "",
    backends: ["UCX"],
  }).createAgent();
  const first = agent.localMetadata();
  // What is asked meanwhile the thread takes up at once: it stalls again, and then reads.
  void agent.localMetadata();
  for (let table = 0; table < 4; table++) {
    const rows = new Float64Array(5 * MILLION).fill(1);
    void agent.prepareLocal({ memoryType: "DRAM", rows, takeRows: true });
  }
  await first;
  parentPort?.postMessage("stalled");
  setInterval(() => {}, 1000);
}
