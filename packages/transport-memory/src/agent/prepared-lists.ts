import {
  DESCRIPTOR_ROW,
  type DescriptorTable,
  KvError,
  type KvErrorCode,
  type MemoryType,
  type PreparedList,
  takeRows,
} from "@kv/interface";
import type { MemoryMap, MemoryRecord } from "../memory/memory.js";
import type { PeerAddress } from "../network/network.js";
import type { DescribedMemory } from "./metadata.js";

export interface PreparedListRecord extends PreparedList, AsyncDisposable {
  readonly rows: DescriptorRows;
  /** Known when the list was prepared. */
  readonly peer: PeerAddress | undefined;
  /** One promise per unreleased transfer. */
  readonly users: Set<Promise<void>>;
  closing: boolean;
}

export class PreparedLists {
  readonly #agentName: string;
  readonly #open = new Set<PreparedListRecord>();
  readonly #known = new WeakSet<PreparedListRecord>();

  constructor(agentName: string) {
    this.#agentName = agentName;
  }

  get size(): number {
    return this.#open.size;
  }

  /** @throws `KV_LIST_INVALID`; `KV_MEMORY_NOT_REGISTERED` for rows outside of own memory. */
  add(
    table: DescriptorTable,
    memories: MemoryMap<DescribedMemory> | MemoryMap<MemoryRecord>,
    peer?: PeerAddress,
  ): PreparedListRecord {
    const owner = `agent ${peer?.name ?? this.#agentName}`;
    const unknownCode = peer === undefined ? "KV_MEMORY_NOT_REGISTERED" : "KV_LIST_INVALID";
    const rows = checkRows(table, memories, owner, unknownCode);
    const close = async (): Promise<void> => {
      record.closing = true;
      await Promise.all(record.users);
      this.#open.delete(record);
    };
    const record: PreparedListRecord = {
      remote: peer?.name,
      count: rows.count,
      memoryType: table.memoryType,
      rows,
      peer,
      users: new Set(),
      closing: false,
      close,
      [Symbol.asyncDispose]: close,
    };
    this.#open.add(record);
    this.#known.add(record);
    return record;
  }

  requireOpen(list: PreparedList, side: "local" | "remote"): PreparedListRecord {
    const subject = `the ${side} list`;
    const record = list as PreparedListRecord;
    if (typeof list !== "object" || list === null || !this.#known.has(record)) {
      throw new KvError(
        "KV_TRANSFER_INVALID",
        `${subject} was not prepared by agent ${this.#agentName}`,
      );
    }
    if (record.closing || !this.#open.has(record)) {
      throw new KvError("KV_LIST_CLOSED", `${subject} of agent ${this.#agentName} is closed`);
    }
    if ((record.peer === undefined) !== (side === "local")) {
      const memory = record.peer === undefined ? "local memory" : `memory of ${record.peer.name}`;
      throw new KvError("KV_TRANSFER_INVALID", `${subject} describes ${memory}`);
    }
    return record;
  }

  refersTo(memory: MemoryRecord): boolean {
    return [...this.#open].some((list) => list.rows.memories.has(memory));
  }

  countOf(remote: string): number {
    return [...this.#open].filter((list) => list.remote === remote).length;
  }

  clear(): void {
    this.#open.clear();
  }
}

interface DescriptorRows {
  readonly count: number;
  readonly memories: ReadonlySet<DescribedMemory>;
  /** `index` is 0 to `count` - 1. */
  addressOf(index: number): number;
  lengthOf(index: number): number;
}

/** Descriptor indices are int32. */
const MAX_DESCRIPTORS = 2 ** 31 - 1;

/** @throws `KV_LIST_INVALID`, and `unknownCode` for a row outside all registered memory. */
function checkRows(
  table: DescriptorTable,
  known: MemoryMap<DescribedMemory> | MemoryMap<MemoryRecord>,
  owner: string,
  unknownCode: KvErrorCode,
): DescriptorRows {
  const memoryType: MemoryType = table.memoryType;
  const invalid = (message: string, code: KvErrorCode = "KV_LIST_INVALID"): KvError =>
    new KvError(code, `a list of ${owner}'s memory: ${message}`);
  if (memoryType !== "DRAM" && memoryType !== "VRAM")
    throw invalid(`memory type ${String(memoryType)}`);
  if (!(table.rows instanceof Float64Array)) throw invalid("its rows are not a Float64Array");
  const rows = table.takeRows ? takeRows(table.rows) : table.rows.slice();
  if (rows.length === 0 || rows.length % DESCRIPTOR_ROW !== 0) {
    throw invalid(`${rows.length} numbers are not rows of ${DESCRIPTOR_ROW} numbers`);
  }
  const numRows = rows.length / DESCRIPTOR_ROW;
  const starts = new Float64Array(numRows + 1);
  const memories = new Set<DescribedMemory>();
  for (let row = 0; row < numRows; row++) {
    const at = row * DESCRIPTOR_ROW;
    const [address, length, device, stride, count] = rows.subarray(
      at,
      at + DESCRIPTOR_ROW,
    ) as unknown as Row;
    const text = `row ${row} [${address}, ${length}, ${device}, ${stride}, ${count}]`;
    if (![address, length, device, stride, count].every((n) => Number.isSafeInteger(n) && n >= 0)) {
      throw invalid(`${text} has a number that is not a non-negative integer`);
    }
    if (length === 0 || count === 0) throw invalid(`${text} is empty`);
    const spanBytes = (count - 1) * stride + length;
    const memory = known.find(address, spanBytes);
    if (memory === undefined) {
      throw invalid(`${text} spans ${spanBytes} bytes outside all registered memory`, unknownCode);
    }
    if (memory.memoryType !== memoryType || memory.deviceId !== device) {
      throw invalid(
        `${text} is ${memory.memoryType} of device ${memory.deviceId}, the list says ${memoryType} of device ${device}`,
      );
    }
    memories.add(memory);
    starts[row + 1] = (starts[row] as number) + count;
  }
  const total = starts[numRows] as number;
  if (total > MAX_DESCRIPTORS)
    throw invalid(`${total} descriptors are more than ${MAX_DESCRIPTORS}`);

  let lastRow = 0;
  function rowOf(index: number): number {
    if (index >= (starts[lastRow] as number) && index < (starts[lastRow + 1] as number))
      return lastRow;
    let low = 0;
    let high = numRows - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if ((starts[middle] as number) <= index) low = middle;
      else high = middle - 1;
    }
    lastRow = low;
    return low;
  }

  return {
    count: total,
    memories,
    addressOf(index) {
      const row = rowOf(index);
      const at = row * DESCRIPTOR_ROW;
      return (rows[at] as number) + (index - (starts[row] as number)) * (rows[at + 3] as number);
    },
    lengthOf: (index) => rows[rowOf(index) * DESCRIPTOR_ROW + 1] as number,
  };
}

type Row = [number, number, number, number, number];
