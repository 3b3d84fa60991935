import { readdirSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import type { Agent, Memory, Transport } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { processorMs, processorTimeOf } from "../costs.js";
import type { Group, Quantity } from "../quantity.js";

const DESCRIPTOR_BYTES = 64;
/** Descriptors of a table are apart, so that NIXL cannot merge them. */
const STRIDE_BYTES = 128;
const MOST_DESCRIPTORS = 1_000_000;

/** Two agents of this process, and memory that both can reach. */
interface Pair {
  readonly transport: Transport;
  readonly near: Agent;
  readonly far: Agent;
  readonly memory: Memory;
}

async function openPair(lengthBytes = MOST_DESCRIPTORS * STRIDE_BYTES): Promise<Pair> {
  const transport = nixlTransport();
  const [near, far] = [await transport.createAgent(), await transport.createAgent()];
  const memory = transport.allocate(lengthBytes);
  for (const agent of [near, far]) await agent.register(memory);
  await near.addRemote(await far.localMetadata());
  return { transport, near, far, memory };
}

async function closePair({ transport, memory }: Pair): Promise<void> {
  await transport.close();
  memory.close();
}

/** A row for each descriptor, at places without a pattern. */
function scattered({ address }: Memory, count: number) {
  const rows = new Float64Array(5 * count);
  for (let at = 0; at < count; at += 1) {
    const place = (at * 7919) % count;
    rows.set([address + place * STRIDE_BYTES, DESCRIPTOR_BYTES, 0, 0, 1], 5 * at);
  }
  return { memoryType: "DRAM" as const, rows };
}

function withPair(
  name: string,
  unit: string,
  sizeOf: string,
  sizes: readonly number[],
  of: PairWork,
): Quantity {
  return {
    name,
    unit,
    sizeOf,
    sizes,
    exponent: 0,
    async measure(size) {
      const pair = await openPair(of.lengthBytes?.(size));
      const cost = await of.measure(pair, size);
      await closePair(pair);
      return cost;
    },
  };
}

interface PairWork {
  lengthBytes?(size: number): number;
  measure(pair: Pair, size: number): Promise<number>;
}

/** Processor time of all threads of work that is done once for each size, in us per item. */
async function once(items: number, work: () => Promise<unknown>): Promise<number> {
  const begunMs = processorMs();
  await work();
  return ((processorMs() - begunMs) * 1000) / items;
}

async function agents(
  count: number,
  use: (agents: readonly Agent[]) => Promise<number>,
): Promise<number> {
  const transport = nixlTransport();
  const opened: Agent[] = [];
  while (opened.length < count) opened.push(await transport.createAgent());
  const cost = await use(opened);
  await transport.close();
  return cost;
}

const THOUSANDS = [10, 100, 1000, 10_000] as const;

const quantities: Quantity[] = [
  withPair(
    "prepare a list of scattered descriptors",
    "us per descriptor",
    "descriptors",
    [1, 10, 100, 1000, 10_000, 100_000, 1_000_000],
    {
      measure: ({ near, memory }, size) => {
        const table = scattered(memory, size);
        return processorTimeOf("us", size, {
          prepare: () => undefined,
          run: async () => (await near.prepareLocal(table)).close(),
        });
      },
    },
  ),
  withPair(
    "one READ of scattered descriptors",
    "us per descriptor",
    "descriptors",
    [100, 1000, 10_000, 100_000],
    {
      async measure({ near, far, memory }, size) {
        const table = scattered(memory, size);
        const [local, remote] = [
          await near.prepareLocal(table),
          await near.prepareRemote(far.name, table),
        ];
        const ids = Int32Array.from({ length: size }, (_, at) => at);
        const read = () =>
          near.transfer({ operation: "READ", local, remote, localIds: ids, remoteIds: ids }).done;
        await read();
        return processorTimeOf("us", size, { prepare: () => undefined, run: read });
      },
    },
  ),
  withPair("READs that are queued at once", "us per READ", "READs queued", THOUSANDS, {
    lengthBytes: () => 1 << 20,
    async measure({ near, far, memory }, size) {
      const table = scattered(memory, 1024);
      const [local, remote] = [
        await near.prepareLocal(table),
        await near.prepareRemote(far.name, table),
      ];
      const read = (at: number) => {
        const ids = Int32Array.of(at & 1023);
        return near.transfer({ operation: "READ", local, remote, localIds: ids, remoteIds: ids })
          .done;
      };
      await read(0);
      return processorTimeOf("us", size, {
        prepare: () => undefined,
        run: () => Promise.all(Array.from({ length: size }, (_, at) => read(at))),
      });
    },
  }),
  withPair(
    "notifications that are sent at once and received",
    "us per notification",
    "notifications",
    THOUSANDS,
    {
      lengthBytes: () => 4096,
      measure: ({ near, far }, size) => {
        const payload = Buffer.from("a notification of some length, as heartbeats are");
        return processorTimeOf("us", size, {
          prepare: () => far.notifications(),
          run: async (received) => {
            const sent = Array.from({ length: size }, () => near.notify(far.name, payload));
            for (let count = 0; count < size; count += 1) await received.next();
            await Promise.all(sent);
          },
          finish: (received) => received.return?.(),
        });
      },
    },
  ),
  withPair("register a region, and undo it", "us per region", "regions", THOUSANDS, {
    lengthBytes: () => 4096,
    async measure({ transport, near }, size) {
      const memories = Array.from({ length: size }, () => transport.allocate(4096));
      const cost = await once(size, async () => {
        const registrations = [];
        for (const memory of memories) registrations.push(await near.register(memory));
        for (const registration of registrations) await registration.close();
      });
      for (const memory of memories) memory.close();
      return cost;
    },
  }),
  withPair(
    "close with regions, lists and notifications open",
    "us per region",
    "regions",
    THOUSANDS,
    {
      lengthBytes: () => 4096,
      async measure({ transport, near, far }, size) {
        const memories = Array.from({ length: size }, () => transport.allocate(4096));
        for (const memory of memories) {
          await near.register(memory);
          await near.prepareLocal(scattered(memory, 32));
        }
        for (let at = 0; at < size; at += 1)
          void near.notify(far.name, Buffer.from("left")).catch(() => {});
        const cost = await once(size, () => near.close());
        for (const memory of memories) memory.close();
        return cost;
      },
    },
  ),
  {
    name: "idle agents that peers can reach: processor time of all",
    unit: "% of a core",
    sizeOf: "agents in a process",
    sizes: [1, 4, 16, 64],
    exponent: 1,
    most: 4,
    measure: (size) =>
      agents(size, async (opened) => {
        const memory = nixlTransport().allocate(4096);
        const registrations = await Promise.all(opened.map((agent) => agent.register(memory)));
        await sleep(1500);
        const beforeMs = processorMs();
        await sleep(1000);
        const cost = (processorMs() - beforeMs) / 10;
        await Promise.all(registrations.map((registration) => registration.close()));
        memory.close();
        return cost;
      }),
  },
  {
    name: "threads",
    unit: "threads per agent",
    sizeOf: "agents in a process",
    sizes: [1, 4, 16, 64],
    exponent: 0,
    measure: async (size) => {
      const before = threads();
      return agents(size, async () => (threads() - before) / size);
    },
  },
  {
    name: "create an agent, and close it",
    unit: "ms per agent",
    sizeOf: "agents in a process",
    sizes: [1, 4, 16, 64],
    exponent: 0,
    measure: async (size) => (await once(size, () => agents(size, async () => 0))) / 1000,
  },
  {
    name: "add a peer, and notify it",
    unit: "us per peer",
    sizeOf: "peers of an agent",
    sizes: [2, 8, 32, 128, 512],
    exponent: 0,
    measure: (size) =>
      agents(size + 1, async ([own, ...peers]) => {
        const all = await Promise.all(peers.map((peer) => peer.localMetadata()));
        return once(size, async () => {
          for (const metadata of all) await own?.addRemote(metadata);
          for (const peer of peers) await own?.notify(peer.name, Buffer.from("hello"));
          for (const peer of peers) await peer.notifications().next();
        });
      }),
  },
];

const threads = () => readdirSync("/proc/self/task").length;

export const nixl: Group = { name: "nixl", title: "@kv/nixl", missing: nixlMissing, quantities };
