// A process that ends as its argument says, with an agent in the state that it says. The test
// checks the exit code.
import { isMainThread, parentPort, Worker, workerData } from "node:worker_threads";
import { nixlTransport } from "@kv/nixl";

const transport = nixlTransport({ backends: [process.env["NIXL_BACKEND"] ?? ""] });

async function liveAgent() {
  const agent = await transport.createAgent();
  const memory = transport.allocate(1 << 22);
  await agent.register(memory);
  return { agent, memory };
}

/** Two agents of this process, and a READ of 64 MiB in scattered pages that has just started. */
async function transferUnderWay() {
  const lengthBytes = 64 << 20;
  const [one, two] = [await transport.createAgent(), await transport.createAgent()];
  const [target, source] = [transport.allocate(lengthBytes), transport.allocate(lengthBytes)];
  await one.register(target);
  await two.register(source);
  await one.addRemote(await two.localMetadata());
  const rows = (base: number) => Float64Array.of(base, 4096, 0, 4096, lengthBytes / 4096);
  const local = await one.prepareLocal({ memoryType: "DRAM", rows: rows(target.address) });
  const remote = await one.prepareRemote(two.name, {
    memoryType: "DRAM",
    rows: rows(source.address),
  });
  const ids = Int32Array.from(
    { length: lengthBytes / 4096 },
    (_, index) => (index * 2741) % (lengthBytes / 4096),
  );
  return one.transfer({ operation: "READ", local, localIds: ids, remote, remoteIds: ids });
}

function copiesUnderWay(): void {
  const memory = transport.allocate(64 << 20);
  for (let copy = 0; copy < 6; copy++) void memory.gather(Float64Array.of(0, 64 << 20));
}

/** Runs this file, bundled to JavaScript, in a worker thread. */
const worker = (ending: string) => new Worker(new URL(import.meta.url), { workerData: { ending } });

const heard = (thread: Worker, event: string) =>
  new Promise((resolve) => thread.once(event, resolve));

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
    await heard(worker("left-open"), "exit");
  },
  async "worker-terminated"() {
    const thread = worker("stay");
    await heard(thread, "message");
    await thread.terminate();
  },
  async "worker-terminated-in-transfer"() {
    const thread = worker("transfer");
    await heard(thread, "message");
    await thread.terminate();
  },
  async "exit-in-copy"() {
    copiesUnderWay();
    process.exit(0);
  },
  async "worker-terminated-in-copy"() {
    const thread = worker("copy");
    await heard(thread, "message");
    await thread.terminate();
  },
  async "several-workers"() {
    const threads = [worker("stay"), worker("stay")];
    await Promise.all(threads.map((thread) => heard(thread, "message")));
    await liveAgent();
    await threads[0]?.terminate();
    process.exit(0);
  },
  async stay() {
    await liveAgent();
    parentPort?.postMessage("ready");
    setInterval(() => {}, 1000);
  },
  async copy() {
    copiesUnderWay();
    parentPort?.postMessage("ready");
    setInterval(() => {}, 1000);
  },
  async transfer() {
    await transferUnderWay();
    parentPort?.postMessage("ready");
    setInterval(() => {}, 1000);
  },
};

const ending = isMainThread ? (process.argv[2] ?? "") : (workerData as { ending: string }).ending;
await ENDINGS[ending]?.();
