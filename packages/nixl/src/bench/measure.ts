import { performance } from "node:perf_hooks";
import { type Agent, KvError, type Memory, type PreparedList } from "@kv/interface";
import type { BenchReport, BenchRow } from "../reports.js";
import { nixlTransport } from "../transport.js";
import type { RemoteTarget } from "./initiator.js";
import { digest, fill, idsOf } from "./pattern.js";
import { digestSchema, doneSchema, openedSchema } from "./protocol.js";
import { spreadOf } from "./report.js";

/** A benchmark measures every combination of operations, sizes, block sizes and orders. */
export interface BenchPlan {
  readonly operations: readonly ("READ" | "WRITE")[];
  /** Bytes per transfer. */
  readonly sizesBytes: readonly number[];
  /** Bytes per descriptor. */
  readonly blocksBytes: readonly number[];
  readonly orders: readonly ("contiguous" | "scattered")[];
  /** Measured transfers per combination. */
  readonly rounds: number;
  readonly check: boolean;
  /** The longest that one transfer may take. */
  readonly timeoutMs: number;
  /** The transport's default when absent. */
  readonly backend?: string | undefined;
  readonly onRow?: ((row: BenchRow) => void) | undefined;
}

/**
 * Skips combinations whose size is no multiple of the block size. Rejects with `KV_REQUEST_INVALID`
 * when none is left, and with errors of the transport and the target.
 */
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
    const backends = backend === undefined ? undefined : [{ name: backend }];
    const agent = await transport.createAgent({ backends });
    memory = transport.allocate(lengthBytes);
    await agent.register(memory);
    const opened = await target.ask({ do: "open", lengthBytes, backend }, openedSchema);
    const remoteName = await agent.addRemote(Buffer.from(opened.metadata, "base64"));
    const rows: BenchRow[] = [];
    for (const cell of cells) {
      const { sizeBytes, blockBytes } = cell;
      const table = ({ address }: { address: number }) => ({
        memoryType: "DRAM" as const,
        rows: Float64Array.of(address, blockBytes, 0, blockBytes, sizeBytes / blockBytes),
      });
      const local = await agent.prepareLocal(table(memory));
      const remote = await agent.prepareRemote(remoteName, table(opened));
      const parts = { agent, memory, target, plan, local, remote, ...cell };
      for (const operation of plan.operations) {
        for (const order of plan.orders) {
          const row = await measureRow({ ...parts, operation, order });
          rows.push(row);
          plan.onRow?.(row);
        }
      }
      await local.close();
      await remote.close();
    }
    return { version: 1, target: target.where, backends: [...agent.backends], rows };
  } finally {
    await transport.close();
    memory?.close();
  }
}

/** One combination, with what measures it. */
interface Row extends Pick<BenchRow, "operation" | "order" | "sizeBytes" | "blockBytes"> {
  readonly agent: Agent;
  readonly memory: Memory;
  readonly target: RemoteTarget;
  readonly plan: BenchPlan;
  readonly local: PreparedList;
  readonly remote: PreparedList;
}

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
  // Not measured: the first transfer connects and touches the memory.
  const consistent = plan.check ? await movesCorrectly(row, once) : null;
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

/** Both sides begin with different bytes, and must end with the source's. */
async function movesCorrectly(
  { operation, memory, target, sizeBytes }: Row,
  move: () => Promise<unknown>,
): Promise<boolean> {
  const ask = () => target.ask({ do: "digest", lengthBytes: sizeBytes }, digestSchema);
  const ours = () => digest(memory.bytes.subarray(0, sizeBytes));
  fill(memory.bytes.subarray(0, sizeBytes));
  await target.ask({ do: "fill" }, doneSchema);
  const [source, other] =
    operation === "READ" ? [(await ask()).sha256, ours()] : [ours(), (await ask()).sha256];
  await move();
  return source !== other && ours() === source && (await ask()).sha256 === source;
}
