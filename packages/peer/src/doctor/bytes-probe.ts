import {
  type Agent,
  type Clock,
  DESCRIPTOR_ROW,
  KvError,
  type Memory,
  type MemoryType,
  type Transport,
} from "@kv/interface";

/** What the probe is asked, as plain data: it runs in a process of its own, because damaged metadata can end the one that gives it to NIXL. */
export interface BytesQuestion {
  /** Rank (0, 0)'s metadata of the transport, in base64. */
  readonly agentMetadata: string;
  readonly deviceId: number;
  readonly memoryType: MemoryType;
  readonly regions: readonly {
    readonly baseAddress: number;
    readonly numBlocks: number;
    readonly blockLengthBytes: number;
    readonly blockStrideBytes: number;
  }[];
  /** Bytes to read at most. */
  readonly limitBytes: number;
  /** Writes back, unchanged, what was read of each region's block 0, which vLLM gives to no request. */
  readonly write: boolean;
  /** Said to these agents at the end: that blocks kept for this check may be freed. */
  readonly farewells: readonly { readonly agentMetadata: string; readonly text: string }[];
  /** Backends as for a worker; the transport's own choice when empty. */
  readonly backends: readonly string[];
}

export interface BytesAnswer {
  readonly backends: readonly string[];
  /** To make the peer known and read its first block, connections and all. */
  readonly connectMs: number;
  readonly block: { readonly lengthBytes: number; readonly medianMs: number };
  readonly bulk: { readonly lengthBytes: number; readonly descriptorCount: number; readonly bestMs: number };
  readonly write: { readonly lengthBytes: number; readonly ms: number } | undefined;
  /** The same bytes came twice, of block 0. */
  readonly isStable: boolean;
  readonly farewells: number;
}

const SINGLE_READS = 15;
const BULK_READS = 3;
const TRANSFER_TIMEOUT_MS = 30_000;

/** Reads a peer's memory, and times it. Errors: the transport's; `KV_TRANSFER_INVALID` for a peer without memory to read. */
export async function probeBytes(
  transport: Transport,
  question: BytesQuestion,
  clock: Clock,
): Promise<BytesAnswer> {
  const agent = await transport.createAgent(
    question.backends.length === 0 ? {} : { backends: question.backends.map((name) => ({ name })) },
  );
  let memory: Memory | undefined;
  try {
    const chosen = rowsWithin(question);
    memory = transport.allocate(chosen.lengthBytes);
    return await readAndWrite(agent, memory, question, chosen, clock);
  } finally {
    await agent.close();
    memory?.close();
  }
}

interface Chosen {
  readonly remoteRows: number[];
  /** Lengths in the order of the descriptors. */
  readonly lengths: number[];
  readonly lengthBytes: number;
}

/** The same number of blocks of each region, from block 0 on, as many as the limit allows. */
function rowsWithin({ regions, limitBytes, deviceId }: BytesQuestion): Chosen {
  const perBlock = regions.reduce((sum, { blockLengthBytes }) => sum + blockLengthBytes, 0);
  if (perBlock === 0) throw new KvError("KV_TRANSFER_INVALID", "the peer announced no memory to read");
  const blocks = Math.max(1, Math.floor(limitBytes / perBlock));
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
  question: BytesQuestion,
  { remoteRows, lengths, lengthBytes }: Chosen,
  clock: Clock,
): Promise<BytesAnswer> {
  await agent.register(memory);
  const begunMs = clock.now();
  const name = await agent.addRemote(Buffer.from(question.agentMetadata, "base64"));
  const remote = await agent.prepareRemote(name, {
    memoryType: question.memoryType,
    rows: Float64Array.from(remoteRows),
  });
  const local = await agent.prepareLocal({ memoryType: memory.memoryType, rows: localRows(memory, lengths) });

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
  const connectMs = clock.now() - begunMs;
  const firstLength = lengths[0] ?? 0;
  const once = memory.bytes.slice(0, firstLength);
  const singles: number[] = [];
  for (let time = 0; time < SINGLE_READS; time++) singles.push(await move("READ", first));
  const isStable = Buffer.compare(once, memory.bytes.subarray(0, firstLength)) === 0;
  const all = Int32Array.from(lengths.keys());
  let bestMs = Number.POSITIVE_INFINITY;
  for (let time = 0; time < BULK_READS; time++) bestMs = Math.min(bestMs, await move("READ", all));

  let write: BytesAnswer["write"];
  if (question.write) {
    const zeros = zeroBlocks(remoteRows);
    write = {
      lengthBytes: Array.from(zeros).reduce((sum, id) => sum + (lengths[id] ?? 0), 0),
      ms: await move("WRITE", zeros),
    };
  }
  for (const { agentMetadata, text } of question.farewells) {
    const to = await agent.addRemote(Buffer.from(agentMetadata, "base64"));
    await agent.notify(to, new TextEncoder().encode(text));
  }
  singles.sort((a, b) => a - b);
  return {
    backends: agent.backends,
    connectMs,
    block: { lengthBytes: firstLength, medianMs: singles[SINGLE_READS >> 1] ?? 0 },
    bulk: { lengthBytes, descriptorCount: lengths.length, bestMs },
    write,
    isStable,
    farewells: question.farewells.length,
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

/** The descriptor of block 0 of each region. */
function zeroBlocks(remoteRows: readonly number[]): Int32Array {
  const ids: number[] = [];
  let next = 0;
  for (let row = 0; row < remoteRows.length; row += DESCRIPTOR_ROW) {
    ids.push(next);
    next += remoteRows[row + DESCRIPTOR_ROW - 1] ?? 0;
  }
  return Int32Array.from(ids);
}
