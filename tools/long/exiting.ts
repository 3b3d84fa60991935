// A process, or a worker thread in one, that uses NIXL until the place that it is told, writes 1 MiB to its stdout, and ends.
// It runs as one file of JavaScript: `run-exits.ts`.
import { isMainThread, parentPort, Worker, workerData } from "node:worker_threads";
import { nixlTransport } from "@kv/nixl";
import { type Exit, OUTPUT_BYTES } from "./exit.js";
import { liveUntil } from "./life.js";

const exit = (isMainThread ? JSON.parse(process.argv[2] ?? "{}") : workerData.exit) as Exit;

async function reached(): Promise<Worker | undefined> {
  if (exit.thread === "main") {
    await liveUntil(nixlTransport(), exit.place);
    return undefined;
  }
  const worker = new Worker(new URL(import.meta.url), { workerData: { exit } });
  await new Promise((resolve, reject) => worker.once("message", resolve).once("error", reject));
  return worker;
}

const write = () =>
  new Promise<void>((resolve) => process.stdout.write("x".repeat(OUTPUT_BYTES), () => resolve()));

if (isMainThread) {
  // Node's exit() cuts off what a pipe has not taken yet, so there the output goes first; else it is under way while the process ends.
  if (exit.ending === "exit") await write();
  const worker = await reached();
  await new Promise((resolve) => setTimeout(resolve, exit.lingerMs));
  if (exit.ending === "exit") process.exit(0);
  void write();
  if (exit.ending === "terminate") await worker?.terminate();
} else {
  await liveUntil(nixlTransport(), exit.place);
  // Where the main thread is to end it, it must not have ended before.
  if (exit.ending !== "return") setInterval(() => {}, 1000);
  parentPort?.postMessage("there");
}
