// A worker sends notifications with a NIXL that takes 300 ms for each. While the worker's own
// thread is within NIXL, the process ends as its argument says.
import { setTimeout as delay } from "node:timers/promises";
import { isMainThread, parentPort, Worker } from "node:worker_threads";
import { nixlTransport } from "@kv/nixl";

const visits = () => Number(process.env["FAKE_NIXL_VISITS"] ?? 0);

async function sendOn() {
  const transport = nixlTransport({ library: process.env["FAKE_NIXL"], backends: ["UCX"] });
  const [sender, receiver] = [await transport.createAgent(), await transport.createAgent()];
  await sender.addRemote(await receiver.localMetadata());
  parentPort?.postMessage("ready");
  while (true) {
    await delay(3);
    await sender.notify(receiver.name, Buffer.from("note"));
  }
}

async function endWithin(ending: string) {
  const worker = new Worker(new URL(import.meta.url));
  await new Promise((resolve) => worker.once("message", resolve));
  const before = visits();
  while (visits() === before) await delay(1);
  process.stdout.write("within a call\n");
  if (ending === "exit") process.exit(0);
  await worker.terminate();
}

await (isMainThread ? endWithin(process.argv[2] ?? "") : sendOn());
