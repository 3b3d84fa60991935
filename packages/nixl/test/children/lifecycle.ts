// A process that ends as its argument says, with an agent in the state that it says. The test
// checks the exit code.
import { once } from "node:events";
import { isMainThread, parentPort, Worker, workerData } from "node:worker_threads";
import { nixlTransport } from "@kv/nixl";
import { pairOf } from "../support/pair.js";
import { scattered } from "../support/pattern.js";

const transport = nixlTransport({ backends: [process.env["NIXL_BACKEND"] ?? ""] });

async function liveAgent() {
  const agent = await transport.createAgent();
  const memory = transport.allocate(1 << 22);
  await agent.register(memory);
  return { agent, memory };
}

/** Two agents of this process, and a READ of 64 MiB in scattered pages that has just started. */
async function transferUnderWay() {
  const { move } = await pairOf(transport, 64 << 20, 4096);
  return move("READ", scattered((64 << 20) / 4096, 2741));
}

function copiesUnderWay(): void {
  const memory = transport.allocate(64 << 20);
  for (let copy = 0; copy < 6; copy++) void memory.gather(Float64Array.of(0, 64 << 20));
}

/** Runs this file, bundled to JavaScript, in a worker thread, until it emits the event. */
async function worker(ending: string, event = "message"): Promise<Worker> {
  const thread = new Worker(new URL(import.meta.url), { workerData: { ending } });
  await once(thread, event);
  return thread;
}

/** Tells the main thread that the worker is ready, and keeps it alive. */
function stay(): void {
  parentPort?.postMessage("ready");
  setInterval(() => {}, 1000);
}

const ENDINGS: Readonly<Record<string, () => Promise<void>>> = {
  async closed() {
    const { agent, memory } = await liveAgent();
    await agent.close();
    await agent.close();
    memory.close();
    await transport.close();
  },
  async "left-open"() {
    await liveAgent();
  },
  async exit() {
    await liveAgent();
    process.exit(0);
  },
  async "exit-7"() {
    await liveAgent();
    process.exit(7);
  },
  async "exit-while-creating"() {
    void liveAgent();
    setTimeout(() => process.exit(0), 150);
  },
  async "exit-in-transfer"() {
    await transferUnderWay();
    process.exit(0);
  },
  async "left-open-in-transfer"() {
    await (await transferUnderWay()).done;
    void transferUnderWay();
  },
  async "heap-growing-while-creating"() {
    const kept: Buffer[] = [];
    let created = false;
    const agents = Promise.all([liveAgent(), liveAgent(), liveAgent(), liveAgent()]).then(() => {
      created = true;
    });
    while (!created) {
      for (let index = 0; index < 100; index++)
        kept.push(Buffer.allocUnsafeSlow(1 + ((index * 997) % 9000)));
      await new Promise((resolve) => setImmediate(resolve));
    }
    await agents;
  },
  async "much-output"() {
    await liveAgent();
    process.stdout.write("x".repeat(1 << 20));
  },
  async throws() {
    await liveAgent();
    throw new Error("thrown on purpose");
  },
  async "waiting-reader"() {
    const { agent } = await liveAgent();
    setTimeout(() => void agent.close(), 50).unref();
    for await (const _ of agent.notifications());
    process.stdout.write("the reader ended");
  },
  async "worker-ends"() {
    await worker("left-open", "exit");
  },
  async "worker-terminated"() {
    await (await worker("stay")).terminate();
  },
  async "worker-terminated-in-transfer"() {
    await (await worker("transfer")).terminate();
  },
  async "exit-in-copy"() {
    copiesUnderWay();
    process.exit(0);
  },
  async "worker-terminated-in-copy"() {
    await (await worker("copy")).terminate();
  },
  async "several-workers"() {
    const [first] = await Promise.all([worker("stay"), worker("stay")]);
    await liveAgent();
    await first.terminate();
    process.exit(0);
  },
  async stay() {
    await liveAgent();
    stay();
  },
  async copy() {
    copiesUnderWay();
    stay();
  },
  async transfer() {
    await transferUnderWay();
    stay();
  },
};

const ending = isMainThread ? (process.argv[2] ?? "") : (workerData as { ending: string }).ending;
await ENDINGS[ending]?.();
