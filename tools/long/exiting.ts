// A process, or a worker thread in it, that uses NIXL up to a given place, writes 1 MiB to its
// stdout, and ends. run-exits.ts bundles it into one file of JavaScript.
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
  // process.exit() drops output that a pipe has not taken yet, so the output is written before it.
  // Otherwise it is still being written at the end.
  if (exit.ending === "exit") await write();
  const worker = await reached();
  await new Promise((resolve) => setTimeout(resolve, exit.lingerMs));
  if (exit.ending === "exit") process.exit(0);
  void write();
  if (exit.ending === "terminate") await worker?.terminate();
} else {
  await liveUntil(nixlTransport(), exit.place);
  // The worker stays alive until the main thread ends it.
  if (exit.ending !== "return") setInterval(() => {}, 1000);
  parentPort?.postMessage("there");
}
