// Drops objects without closing them and collects garbage: nothing that NIXL or a view can reach
// may be freed.
import { setImmediate as turn } from "node:timers/promises";
import { hostMemory, nixlTransport, sharedMemory } from "@kv/nixl";
import { blocksOf, listsOf } from "../support/pair.js";
import { scattered } from "../support/pattern.js";

const LENGTH = 8 << 20;
const collect = async () => {
  for (let round = 0; round < 8; round++) {
    globalThis.gc?.();
    await turn();
  }
};
const transport = nixlTransport();
const [reader, owner] = [await transport.createAgent(), await transport.createAgent()];

async function registerAndForget(agent: typeof owner, value: number): Promise<number> {
  const memory = transport.allocate(LENGTH);
  memory.bytes.fill(value);
  await agent.register(memory);
  return memory.address;
}

const source = await registerAndForget(owner, 42);
await collect();
await reader.addRemote(await owner.localMetadata());
const theirs = { address: source };
const bytes = await (async () => {
  const memory = transport.allocate(LENGTH);
  await reader.register(memory);
  const { move } = await listsOf(reader, memory, owner.name, theirs, 4096, LENGTH / 4096);
  await reader.prepareRemote(owner.name, blocksOf(theirs, 4096, LENGTH / 4096));
  const { done } = move("READ", scattered(LENGTH / 4096));
  await collect();
  await done;
  return memory.bytes;
})();
await collect();
// A table that was taken over; only the native thread still uses it.
const rows = new Float64Array(5_000_000);
for (let at = 0; at < rows.length; at += 5) rows.set([source, 4096, 0, 4096, 1], at);
const taking = reader.prepareRemote(owner.name, { memoryType: "DRAM", rows, takeRows: true });
await collect();
if ((await taking).count !== 1_000_000) throw new Error("the rows are not those that were given");
if (!bytes.every((byte) => byte === 42)) throw new Error("the bytes are not those that were sent");

// Memory of the caller: its owner stays while it is registered, and is collected once nobody has
// it.
const left = { owners: 2 };
const ended = new FinalizationRegistry(() => {
  left.owners -= 1;
});
const registration = await (async () => {
  const shared = new SharedArrayBuffer(LENGTH);
  const owner = { memory: transport.allocate(LENGTH) };
  for (const object of [shared, owner]) ended.register(object, 0);
  const memory = hostMemory({ address: owner.memory.address, lengthBytes: LENGTH, owner });
  return [await reader.register(sharedMemory(shared)), await reader.register(memory)] as const;
})();
await collect();
if (left.owners < 2) throw new Error("memory that is registered was collected");
await (async () => {
  for (const { memory, close } of registration) {
    await close();
    memory.close();
  }
})();
await collect();
if (left.owners > 0) throw new Error(`${left.owners} owners of closed memory were not collected`);

// Unreferenced memory is freed: 40 allocations of 32 MiB do not add up.
const before = process.memoryUsage().rss;
for (let round = 0; round < 40; round++) {
  transport.allocate(32 << 20).bytes[0] = 1;
  if (round % 10 === 9) await collect();
}
await collect();
const grown = process.memoryUsage().rss - before;
if (grown > 640 * (1 << 20)) throw new Error(`memory that was dropped stayed: ${grown} bytes`);
// The transport closes agents that were dropped.
await transport.createAgent();
await collect();
await transport.close();
process.stdout.write("collected");
