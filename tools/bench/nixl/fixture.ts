import { performance } from "node:perf_hooks";
import { nixlTransport } from "@kv/nixl";
import type { LinePeer } from "../../clients/python.js";
import { nodeTarget, pythonNixl } from "../python-peer.js";

export interface Place {
  readonly name: string;
  readonly address: number;
  readonly metadata: string;
}

/** What the parts of the benchmark share. */
export type BenchFixture = Awaited<ReturnType<typeof openFixture>>;

export const LENGTH_BYTES = 512 * 2 ** 20;

/** Of all three processes. */
export interface FixtureOptions {
  readonly backend?: string;
  readonly memoryType?: "DRAM" | "VRAM";
  readonly numThreads?: number;
}

export async function openPair(
  lengthBytes: number,
  { backend = "UCX", memoryType = "DRAM", numThreads = 0 }: FixtureOptions = {},
) {
  const far = nodeTarget(backend);
  const request = { do: "open", lengthBytes, memoryType };
  const opened = await far.ask<Place & { readonly pid: number }>(request);
  const parameters = numThreads > 0 ? { num_threads: String(numThreads) } : {};
  const transport = nixlTransport({ backends: [{ name: backend, parameters }] });
  const agent = await transport.createAgent();
  const memory = transport.allocate(lengthBytes, { memoryType });
  await agent.register(memory);
  await agent.addRemote(Buffer.from(opened.metadata, "hex"));
  const close = async () => {
    await transport.close();
    memory.close();
    await far.close();
  };
  return { agent, memory, target: { ...far, ...opened }, close };
}

/** Python's agent has the same target. */
export async function openFixture(rounds: number, options: FixtureOptions = {}) {
  const { close, ...pair } = await openPair(LENGTH_BYTES, options);
  const { agent, memory, target } = pair;
  const { backend = "UCX", memoryType, numThreads } = options;
  const python = await pythonNixl(backend, numThreads);
  const { metadata, address } = target;
  await python.ask({ do: "open", metadata, address, length: LENGTH_BYTES, memoryType });
  const own = Buffer.from(await agent.localMetadata()).toString("hex");
  await target.ask({ do: "know", metadata: own, address: memory.address });
  return {
    ...pair,
    backend,
    python,
    rounds,
    async close() {
      await close();
      await python.close();
    },
  };
}

/** Once before the rounds too. */
export async function series<Figure extends string>(
  rounds: number,
  measure: (round: number) => Promise<Readonly<Record<Figure, number>>>,
): Promise<Record<Figure, number[]>> {
  await measure(-1);
  const all: Partial<Record<Figure, number[]>> = {};
  for (let round = 0; round < rounds; round += 1) {
    const figures = Object.entries(await measure(round)) as [Figure, number][];
    for (const [name, figure] of figures) all[name] = [...(all[name] ?? []), figure];
  }
  return all as Record<Figure, number[]>;
}

export async function timed(work: () => Promise<unknown>): Promise<number> {
  const begun = performance.now();
  await work();
  return performance.now() - begun;
}

/** Python's progress thread uses most of a core even when idle, so the process is stopped. */
export async function withoutPython<T>(python: LinePeer, work: () => Promise<T>): Promise<T> {
  python.pause();
  const result = await work();
  python.resume();
  return result;
}

export function shuffled(count: number, seed: number): Int32Array {
  const ids = Int32Array.from({ length: count }, (_, i) => i);
  let state = seed;
  for (let i = count - 1; i > 0; i -= 1) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    const j = state % (i + 1);
    [ids[i], ids[j]] = [ids[j] ?? 0, ids[i] ?? 0];
  }
  return ids;
}

export async function lists(
  { agent, memory, target }: Pick<BenchFixture, "agent" | "memory"> & { readonly target: Place },
  block: number,
  count: number,
) {
  const table = (address: number) => ({
    memoryType: memory.memoryType,
    rows: Float64Array.of(address, block, 0, block, count),
  });
  const local = await agent.prepareLocal(table(memory.address));
  const remote = await agent.prepareRemote(target.name, table(target.address));
  return {
    move: (operation: "READ" | "WRITE", localIds: Int32Array, remoteIds = localIds) =>
      agent.transfer({ operation, local, remote, localIds, remoteIds }).done,
    async close() {
      await local.close();
      await remote.close();
    },
  };
}
