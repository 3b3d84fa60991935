import { readdirSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import type { Agent, Memory, Transport } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { nixlMissing } from "@kv/testing/nixl/nixl-available";
import { type Group, processorMsOf, processorTimeOf, type Quantity } from "./measure.js";

const DESCRIPTOR_BYTES = 64;
/** Descriptors of a table are apart, so that NIXL cannot merge them. */
const STRIDE_BYTES = 128;
const THOUSANDS = [10, 100, 1000, 10_000] as const;
const AGENTS = [1, 4, 16, 64] as const;

interface Agents {
  readonly transport: Transport;
  readonly near: Agent;
  readonly others: readonly Agent[];
}

async function withAgents(
  count: number,
  use: (agents: Agents) => Promise<number>,
): Promise<number> {
  const transport = nixlTransport();
  const near = await transport.createAgent();
  const others: Agent[] = [];
  while (others.length < count - 1) others.push(await transport.createAgent());
  const cost = await use({ transport, near, others });
  await transport.close();
  return cost;
}

interface Pair extends Agents {
  readonly far: Agent;
  readonly memory: Memory;
}

const withPair = (
  name: string,
  unit: string,
  sizeOf: string,
  sizes: readonly number[],
  descriptors: number,
  measure: (pair: Pair, size: number) => Promise<number>,
): Quantity => ({
  name,
  unit,
  sizeOf,
  sizes,
  async measure(size) {
    const closed: Memory[] = [];
    const cost = await withAgents(2, async (agents) => {
      const { transport, near, others } = agents;
      const memory = transport.allocate(descriptors * STRIDE_BYTES);
      closed.push(memory);
      const [far = near] = others;
      for (const agent of [near, far]) await agent.register(memory);
      await near.addRemote(await far.localMetadata());
      return measure({ ...agents, far, memory }, size);
    });
    // Agents that are closed hold none of it.
    for (const memory of closed) memory.close();
    return cost;
  },
});

function scattered({ address }: Memory, count: number) {
  const rows = new Float64Array(5 * count);
  for (let at = 0; at < count; at += 1) {
    const place = (at * 7919) % count;
    rows.set([address + place * STRIDE_BYTES, DESCRIPTOR_BYTES, 0, 0, 1], 5 * at);
  }
  return { memoryType: "DRAM" as const, rows };
}

async function reader({ near, far, memory }: Pair, descriptors: number) {
  const table = scattered(memory, descriptors);
  const local = await near.prepareLocal(table);
  const remote = await near.prepareRemote(far.name, table);
  const read = (ids: Int32Array) =>
    near.transfer({ operation: "READ", local, remote, localIds: ids, remoteIds: ids }).done;
  await read(Int32Array.of(0));
  return read;
}

const again = (items: number, run: () => unknown) =>
  processorTimeOf("us", items, () => undefined, run);

const once = async (items: number, run: () => unknown) =>
  ((await processorMsOf(run)) * 1000) / items;

const pages = (transport: Transport, count: number) =>
  Array.from({ length: count }, () => transport.allocate(4096));

const threads = () => readdirSync("/proc/self/task").length;

export const group: Group = {
  title: "@kv/nixl",
  missing: nixlMissing,
  quantities: [
    withPair(
      "prepare a list of scattered descriptors",
      "us per descriptor",
      "descriptors",
      [1, 10, 100, 1000, 10_000, 100_000, 1_000_000],
      1_000_000,
      ({ near, memory }, size) => {
        const table = scattered(memory, size);
        return again(size, async () => (await near.prepareLocal(table)).close());
      },
    ),
    withPair(
      "one READ of scattered descriptors",
      "us per descriptor",
      "descriptors",
      [100, 1000, 10_000, 100_000],
      1_000_000,
      async (pair, size) => {
        const read = await reader(pair, size);
        const ids = Int32Array.from({ length: size }, (_, at) => at);
        await read(ids);
        return again(size, () => read(ids));
      },
    ),
    withPair(
      "READs that are queued at once",
      "us per READ",
      "READs queued",
      THOUSANDS,
      8192,
      async (pair, size) => {
        const read = await reader(pair, 1024);
        const one = (_: unknown, at: number) => read(Int32Array.of(at & 1023));
        return again(size, () => Promise.all(Array.from({ length: size }, one)));
      },
    ),
    withPair(
      "notifications that are sent at once and received",
      "us per notification",
      "notifications",
      THOUSANDS,
      32,
      ({ near, far }, size) => {
        const payload = Buffer.from("a notification of some length, as heartbeats are");
        return processorTimeOf(
          "us",
          size,
          () => far.notifications(),
          async (received) => {
            const sent = Array.from({ length: size }, () => near.notify(far.name, payload));
            for (let count = 0; count < size; count += 1) await received.next();
            await Promise.all(sent);
          },
          (received) => received.return?.(),
        );
      },
    ),
    withPair(
      "register a region, and undo it",
      "us per region",
      "regions",
      THOUSANDS,
      32,
      async ({ transport, near }, size) => {
        const memories = pages(transport, size);
        const cost = await once(size, async () => {
          const registrations = [];
          for (const memory of memories) registrations.push(await near.register(memory));
          for (const registration of registrations) await registration.close();
        });
        for (const memory of memories) memory.close();
        return cost;
      },
    ),
    withPair(
      "close with regions, lists and notifications open",
      "us per region",
      "regions",
      THOUSANDS,
      32,
      async ({ transport, near, far }, size) => {
        const memories = pages(transport, size);
        for (const memory of memories) {
          await near.register(memory);
          await near.prepareLocal(scattered(memory, 32));
          void near.notify(far.name, Buffer.from("left")).catch(() => {});
        }
        const cost = await once(size, () => near.close());
        for (const memory of memories) memory.close();
        return cost;
      },
    ),
    {
      name: "idle agents that peers can reach: processor time of all",
      unit: "% of a core",
      sizeOf: "agents in a process",
      sizes: AGENTS,
      exponent: 1,
      most: 4,
      measure: (size) =>
        withAgents(size, async ({ near, others }) => {
          const memory = nixlTransport().allocate(4096);
          const registrations = [];
          for (const agent of [near, ...others]) registrations.push(await agent.register(memory));
          await sleep(1500);
          const cost = (await processorMsOf(() => sleep(1000))) / 10;
          for (const registration of registrations) await registration.close();
          memory.close();
          return cost;
        }),
    },
    {
      name: "threads",
      unit: "threads per agent",
      sizeOf: "agents in a process",
      sizes: AGENTS,
      measure: (size) => {
        const before = threads();
        return withAgents(size, async () => (threads() - before) / size);
      },
    },
    {
      name: "create an agent, and close it",
      unit: "ms per agent",
      sizeOf: "agents in a process",
      sizes: AGENTS,
      measure: async (size) => (await once(size, () => withAgents(size, async () => 0))) / 1000,
    },
    {
      name: "add a peer, and notify it",
      unit: "us per peer",
      sizeOf: "peers of an agent",
      sizes: [2, 8, 32, 128, 512],
      measure: (size) =>
        withAgents(size + 1, async ({ near, others }) => {
          const all = await Promise.all(others.map((peer) => peer.localMetadata()));
          return once(size, async () => {
            for (const metadata of all) await near.addRemote(metadata);
            for (const peer of others) await near.notify(peer.name, Buffer.from("hello"));
            for (const peer of others) await peer.notifications().next();
          });
        }),
    },
  ],
};
