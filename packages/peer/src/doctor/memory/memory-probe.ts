import { createRequire } from "node:module";
import {
  type Agent,
  type Clock,
  DESCRIPTOR_ROW,
  KvError,
  type Memory,
  type MemoryType,
  type Transport,
} from "@kv/interface";
import { type ChildOutcome, runInChild } from "@kv/program";

/** Plain data, because a child process may probe: NIXL can crash on damaged metadata. */
export interface ProbeRequest {
  readonly agentMetadata: string;
  readonly deviceId: number;
  readonly memoryType: MemoryType;
  readonly regions: readonly {
    readonly baseAddress: number;
    readonly numBlocks: number;
    readonly blockLengthBytes: number;
    readonly blockStrideBytes: number;
  }[];
  readonly limitBytes: number;
  /** Write block 0 of each region back unchanged. */
  readonly write: boolean;
  /** They free the blocks that the server keeps for the doctor. */
  readonly notifications: readonly { readonly agentMetadata: string; readonly text: string }[];
  readonly backends: readonly string[];
}

export interface ProbeResult {
  readonly backends: readonly string[];
  readonly connectMs: number;
  readonly block: { readonly lengthBytes: number; readonly medianMs: number };
  readonly bulk: {
    readonly lengthBytes: number;
    readonly descriptorCount: number;
    readonly bestMs: number;
  };
  readonly write:
    | {
        readonly lengthBytes: number;
        /** Null blocks move several times, so that one transfer can be timed. */
        readonly movedBytes: number;
        readonly writeMs: number;
        readonly readMs: number;
      }
    | undefined;
  readonly isStable: boolean;
}

const SINGLE_READS = 15;
const BULK_READS = 3;
const COMPARED_BYTES = 8 << 20;
const MAX_REPEATS = 64;
const TRANSFER_TIMEOUT_MS = 30_000;

/**
 * Frees the blocks that the server keeps, also when reading fails. Undefined for a limit of 0 bytes,
 * with which nothing is read.
 *
 * @throws those of the transport; `KV_TRANSFER_INVALID` for a peer without memory.
 */
export async function probeMemory(
  transport: Transport,
  request: ProbeRequest,
  clock: Clock,
): Promise<ProbeResult | undefined> {
  const agent = await transport.createAgent(
    request.backends.length === 0 ? {} : { backends: request.backends.map((name) => ({ name })) },
  );
  let memory: Memory | undefined;
  try {
    if (request.limitBytes === 0) return undefined;
    const descriptors = chooseDescriptors(request);
    memory = transport.allocate(descriptors.lengthBytes);
    return await readAndWrite(agent, memory, request, descriptors, clock);
  } finally {
    await notify(agent, request.notifications).finally(() => agent.close());
    memory?.close();
  }
}

async function notify(agent: Agent, notifications: ProbeRequest["notifications"]): Promise<void> {
  for (const { agentMetadata, text } of notifications) {
    const to = await agent.addRemote(Buffer.from(agentMetadata, "base64"));
    await agent.notify(to, new TextEncoder().encode(text));
  }
}

/**
 * Probes over NIXL in a child process, killed after `timeoutMs`. `environment` extends this one's.
 */
export function probeInChildProcess(
  request: ProbeRequest,
  timeoutMs: number,
  environment: Readonly<Record<string, string>> = {},
): Promise<ChildOutcome<ProbeResult | undefined>> {
  return runInChild({
    module: createRequire(import.meta.url).resolve("@kv/peer/probe-child"),
    request,
    timeoutMs,
    env: { ...process.env, UCX_PROTO_INFO: "y", ...environment },
  });
}

interface Descriptors {
  readonly remoteRows: number[];
  readonly lengths: number[];
  readonly lengthBytes: number;
}

function chooseDescriptors({ regions, limitBytes, deviceId }: ProbeRequest): Descriptors {
  const bytesPerBlock = regions.reduce((sum, { blockLengthBytes }) => sum + blockLengthBytes, 0);
  if (bytesPerBlock === 0)
    throw new KvError("KV_TRANSFER_INVALID", "the peer announced no memory to read");
  const blocks = Math.max(1, Math.floor(limitBytes / bytesPerBlock));
  const remoteRows: number[] = [];
  const lengths: number[] = [];
  for (const { baseAddress, numBlocks, blockLengthBytes, blockStrideBytes } of regions) {
    const count = Math.min(blocks, numBlocks);
    remoteRows.push(baseAddress, blockLengthBytes, deviceId, blockStrideBytes, count);
    for (let block = 0; block < count; block++) lengths.push(blockLengthBytes);
  }
  return { remoteRows, lengths, lengthBytes: lengths.reduce((sum, length) => sum + length, 0) };
}

async function readAndWrite(
  agent: Agent,
  memory: Memory,
  request: ProbeRequest,
  { remoteRows, lengths, lengthBytes }: Descriptors,
  clock: Clock,
): Promise<ProbeResult> {
  await agent.register(memory);
  const startedMs = clock.now();
  const name = await agent.addRemote(Buffer.from(request.agentMetadata, "base64"));
  const remote = await agent.prepareRemote(name, {
    memoryType: request.memoryType,
    rows: Float64Array.from(remoteRows),
  });
  const local = await agent.prepareLocal({
    memoryType: memory.memoryType,
    rows: localRows(memory, lengths),
  });

  async function move(operation: "READ" | "WRITE", ids: Int32Array): Promise<number> {
    const startMs = clock.now();
    const transfer = agent.transfer({
      operation,
      local,
      localIds: ids,
      remote,
      remoteIds: ids,
      timeoutMs: TRANSFER_TIMEOUT_MS,
    });
    await transfer.done;
    return clock.now() - startMs;
  }

  const first = Int32Array.of(0);
  await move("READ", first);
  const connectMs = clock.now() - startedMs;
  const firstLength = lengths[0] ?? 0;
  const firstRead = memory.bytes.slice(0, firstLength);
  const singles: number[] = [];
  for (let time = 0; time < SINGLE_READS; time++) singles.push(await move("READ", first));
  const isStable = Buffer.compare(firstRead, memory.bytes.subarray(0, firstLength)) === 0;
  const all = Int32Array.from(lengths.keys());
  let bestMs = Number.POSITIVE_INFINITY;
  for (let time = 0; time < BULK_READS; time++) bestMs = Math.min(bestMs, await move("READ", all));

  let write: ProbeResult["write"];
  if (request.write) {
    const nullBlocks = nullBlockIds(remoteRows);
    const nullBytes = nullBlocks.reduce((sum, id) => sum + (lengths[id] ?? 0), 0);
    // They hold what the last read returned.
    const repeats = Math.min(MAX_REPEATS, Math.max(1, Math.floor(COMPARED_BYTES / nullBytes)));
    const repeated = Int32Array.from(Array.from({ length: repeats }, () => nullBlocks).flat());
    let [writeMs, readMs] = [Number.POSITIVE_INFINITY, Number.POSITIVE_INFINITY];
    for (let time = 0; time < BULK_READS; time++) {
      writeMs = Math.min(writeMs, await move("WRITE", repeated));
      readMs = Math.min(readMs, await move("READ", repeated));
    }
    write = { lengthBytes: nullBytes, movedBytes: nullBytes * repeats, writeMs, readMs };
  }
  singles.sort((a, b) => a - b);
  return {
    backends: agent.backends,
    connectMs,
    block: { lengthBytes: firstLength, medianMs: singles[SINGLE_READS >> 1] ?? 0 },
    bulk: { lengthBytes, descriptorCount: lengths.length, bestMs },
    write,
    isStable,
  };
}

function localRows(memory: Memory, lengths: readonly number[]): Float64Array {
  const rows = new Float64Array(lengths.length * DESCRIPTOR_ROW);
  let offset = 0;
  for (const [index, length] of lengths.entries()) {
    rows.set([memory.address + offset, length, memory.deviceId, length, 1], index * DESCRIPTOR_ROW);
    offset += length;
  }
  return rows;
}

function nullBlockIds(remoteRows: readonly number[]): number[] {
  const ids: number[] = [];
  let next = 0;
  for (let row = 0; row < remoteRows.length; row += DESCRIPTOR_ROW) {
    ids.push(next);
    next += remoteRows[row + DESCRIPTOR_ROW - 1] ?? 0;
  }
  return ids;
}
