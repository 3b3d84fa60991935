import { performance } from "node:perf_hooks";
import { type Agent, KvError, type Memory } from "@kv/interface";
import { unframeMetadata } from "../metadata/frame.js";
import { nixlTransport } from "../transport.js";
import type { RemoteTarget } from "./initiator.js";
import { digestSchema, doneSchema, openedSchema } from "./messages.js";
import { digest, fill, idsOf } from "./pattern.js";
import { type BenchReport, type BenchRow, spreadOf } from "./report.js";

export interface BenchPlan {
  readonly operations: readonly ("READ" | "WRITE")[];
  readonly sizesBytes: readonly number[];
  readonly blocksBytes: readonly number[];
  readonly orders: readonly ("contiguous" | "scattered")[];
  readonly rounds: number;
  /** Compare both sides' bytes. */
  readonly check: boolean;
  readonly timeoutMs: number;
  readonly backend?: string;
  readonly onRow?: (row: BenchRow) => void;
}

/** Runs every combination of the plan in which whole blocks make up the size. Errors: the transport's, the target's; `KV_REQUEST_INVALID`. */
export async function measure(target: RemoteTarget, plan: BenchPlan): Promise<BenchReport> {
  const cells = plan.sizesBytes.flatMap((sizeBytes) =>
    plan.blocksBytes
      .filter((blockBytes) => blockBytes <= sizeBytes && sizeBytes % blockBytes === 0)
      .map((blockBytes) => ({ sizeBytes, blockBytes })),
  );
  if (cells.length === 0) {
    throw new KvError("KV_REQUEST_INVALID", "no size is a multiple of any block size", {
      hint: "such as --sizes 64MiB --blocks 4KiB,64KiB",
    });
  }
  const { backend } = plan;
  const lengthBytes = Math.max(...plan.sizesBytes);
  const transport = nixlTransport();
  let memory: Memory | undefined;
  try {
    const agent = await transport.createAgent(backend === undefined ? {} : { backends: [{ name: backend }] });
    memory = transport.allocate(lengthBytes);
    await agent.register(memory);
    const request = { do: "open", lengthBytes, ...(backend === undefined ? {} : { backend }) } as const;
    const opened = await target.ask(request, openedSchema);
    const remoteName = await agent.addRemote(unframeMetadata(Buffer.from(opened.metadata, "base64")));
    const rows: BenchRow[] = [];
    for (const cell of cells) {
      const lists = await prepareLists(agent, remoteName, memory.address, opened.address, cell);
      for (const operation of plan.operations) {
        for (const order of plan.orders) {
          const row = await measureRow({ agent, memory, target, plan, ...cell, ...lists, operation, order });
          rows.push(row);
          plan.onRow?.(row);
        }
      }
      await lists.local.close();
      await lists.remote.close();
    }
    return { version: 1, target: target.where, backends: [...agent.backends], rows };
  } finally {
    await transport.close();
    memory?.close();
  }
}

async function prepareLists(
  agent: Agent,
  remoteName: string,
  localAddress: number,
  remoteAddress: number,
  { sizeBytes, blockBytes }: { sizeBytes: number; blockBytes: number },
) {
  const table = (address: number) => ({
    memoryType: "DRAM" as const,
    rows: Float64Array.of(address, blockBytes, 0, blockBytes, sizeBytes / blockBytes),
  });
  return {
    local: await agent.prepareLocal(table(localAddress)),
    remote: await agent.prepareRemote(remoteName, table(remoteAddress)),
  };
}

type Row = Awaited<ReturnType<typeof prepareLists>> &
  Pick<BenchRow, "operation" | "order" | "sizeBytes" | "blockBytes"> & {
    agent: Agent;
    memory: Memory;
    target: RemoteTarget;
    plan: BenchPlan;
  };

async function measureRow(row: Row): Promise<BenchRow> {
  const { agent, local, remote, operation, order, sizeBytes, blockBytes, plan } = row;
  const ids = idsOf(sizeBytes / blockBytes, order);
  const once = async () => {
    const begun = performance.now();
    const { done } = agent.transfer({
      operation,
      local,
      localIds: ids,
      remote,
      remoteIds: ids,
      timeoutMs: plan.timeoutMs,
    });
    const result = await done;
    return { ...result, totalMs: performance.now() - begun };
  };
  // The first one connects, and touches what was not touched.
  const consistent = plan.check ? await movedUnchanged(row, once) : null;
  if (!plan.check) await once();
  const results: Awaited<ReturnType<typeof once>>[] = [];
  for (let round = 0; round < plan.rounds; round++) results.push(await once());
  return {
    operation,
    sizeBytes,
    blockBytes,
    order,
    rounds: plan.rounds,
    prepareMs: spreadOf(results.map(({ prepareMs = 0 }) => prepareMs)),
    postMs: spreadOf(results.map(({ postMs }) => postMs)),
    transferMs: spreadOf(results.map(({ transferMs }) => transferMs)),
    totalMs: spreadOf(results.map(({ totalMs }) => totalMs)),
    gigabytesPerSecond: spreadOf(results.map(({ totalMs }) => sizeBytes / totalMs / 1e6)),
    consistent,
  };
}

let seed = 0;

/** Two sides that differ before the transfer; after it both hold what its source held. */
async function movedUnchanged(
  { operation, memory, target, sizeBytes }: Row,
  move: () => Promise<unknown>,
): Promise<boolean> {
  const ask = () => target.ask({ do: "digest", lengthBytes: sizeBytes }, digestSchema);
  const ours = () => digest(memory.bytes.subarray(0, sizeBytes));
  seed += 2;
  fill(memory.bytes.subarray(0, sizeBytes), seed);
  await target.ask({ do: "fill", seed: seed + 1 }, doneSchema);
  const [source, other] =
    operation === "READ" ? [(await ask()).sha256, ours()] : [ours(), (await ask()).sha256];
  await move();
  return source !== other && ours() === source && (await ask()).sha256 === source;
}
