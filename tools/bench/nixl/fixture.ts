import type { Agent, Memory } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import type { LinePeer } from "../../clients/python.js";
import { nodeTarget, pythonNixl } from "../python-peer.js";

/** An agent's name and the address of its memory. */
export interface Place {
  readonly name: string;
  readonly address: number;
}

/**
 * What the parts of the benchmark share: our agent, Python's agent, and the target process of both.
 */
export interface BenchFixture {
  readonly backend: string;
  readonly agent: Agent;
  readonly memory: Memory;
  readonly target: LinePeer & Place & { readonly pid: number; readonly metadata: string };
  readonly python: LinePeer;
  close(): Promise<void>;
}

export const LENGTH_BYTES = 512 * 2 ** 20;
/** Rounds for each figure. A median of fewer means little on a machine that runs other work. */
export const ROUNDS = Math.max(7, Number(process.env["KV_BENCH_ROUNDS"] ?? 9));

/** Measures in rounds, and once before them. Returns the series of each figure. */
export async function series<Figure extends string>(
  measure: (round: number) => Promise<Readonly<Record<Figure, number>>>,
  rounds = ROUNDS,
): Promise<Record<Figure, number[]>> {
  await measure(-1);
  const all: Partial<Record<Figure, number[]>> = {};
  for (let round = 0; round < rounds; round += 1) {
    const figures = Object.entries(await measure(round)) as [Figure, number][];
    for (const [name, figure] of figures) all[name] = [...(all[name] ?? []), figure];
  }
  return all as Record<Figure, number[]>;
}

/**
 * Host memory, or memory of the first GPU, at all three processes. `numThreads` is UCX's parameter
 * `num_threads` of both agents.
 */
export interface FixtureOptions {
  readonly memoryType?: "DRAM" | "VRAM";
  readonly numThreads?: number;
}

/** An agent of ours with its memory, and the target process, which it knows. */
export async function openPair(
  lengthBytes: number,
  backend = "UCX",
  { memoryType = "DRAM", numThreads = 0 }: FixtureOptions = {},
) {
  const far = nodeTarget(backend);
  const request = { do: "open", lengthBytes, memoryType };
  const opened = await far.ask<Place & { metadata: string; pid: number }>(request);
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

export async function openFixture(
  backend = "UCX",
  options: FixtureOptions = {},
): Promise<BenchFixture> {
  const { close, ...pair } = await openPair(LENGTH_BYTES, backend, options);
  const { agent, memory, target } = pair;
  const python = await pythonNixl(backend, options.numThreads);
  const { memoryType = "DRAM" } = options;
  const { metadata, address } = target;
  await python.ask({ do: "open", metadata, address, length: LENGTH_BYTES, memoryType });
  const own = Buffer.from(await agent.localMetadata()).toString("hex");
  await target.ask({ do: "know", metadata: own, address: memory.address });
  return {
    ...pair,
    backend,
    python,
    async close() {
      await close();
      await python.close();
    },
  };
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

export const inOrder = (count: number): Int32Array =>
  Int32Array.from({ length: count }, (_, i) => i);

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
    local,
    remote,
    async close() {
      await local.close();
      await remote.close();
    },
  };
}
