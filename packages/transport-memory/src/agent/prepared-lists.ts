import {
  DESCRIPTOR_ROW,
  type DescriptorTable,
  KvError,
  type KvErrorCode,
  type MemoryType,
  type PreparedList,
  takeRows,
} from "@kv/interface";
import type { MemoryRecord } from "../memory/memory.js";
import type { MemoryMap } from "../memory/memory-map.js";
import type { PeerAddress } from "../network/endpoints.js";
import type { DescribedMemory } from "./metadata.js";

/** A prepared list, as its agent holds it. */
export interface PreparedListRecord extends PreparedList, AsyncDisposable {
  readonly rows: DescriptorRows<DescribedMemory>;
  /**
   * For a list of a peer's memory: the incarnation of the peer that was known when the list was
   * prepared.
   */
  readonly peer: PeerAddress | undefined;
  /** One promise for each transfer that is not released. */
  readonly users: Set<Promise<void>>;
  /** True from the first call of `close` on. */
  closing: boolean;
}

/** The prepared lists of one agent. */
export class PreparedLists {
  readonly #agentName: string;
  readonly #open = new Map<PreparedList, PreparedListRecord>();
  /** All lists of this agent, closed ones too. */
  readonly #known = new WeakSet<PreparedList>();

  constructor(agentName: string) {
    this.#agentName = agentName;
  }

  get size(): number {
    return this.#open.size;
  }

  /**
   *
   * @throws `KV_LIST_INVALID`, `KV_MEMORY_NOT_REGISTERED`.
   */
  addLocal(table: DescriptorTable, memories: MemoryMap<MemoryRecord>): PreparedListRecord {
    const owner = `agent ${this.#agentName}`;
    const unknownCode = "KV_MEMORY_NOT_REGISTERED";
    return this.#add(table, checkRows({ table, owner, unknownCode, find: memories.find }));
  }

  /**
   *
   * @throws `KV_LIST_INVALID`.
   */
  addRemote(
    table: DescriptorTable,
    peer: PeerAddress,
    memories: MemoryMap<DescribedMemory>,
  ): PreparedListRecord {
    const owner = `agent ${peer.name}`;
    const rows = checkRows({ table, owner, unknownCode: "KV_LIST_INVALID", find: memories.find });
    return this.#add(table, rows, peer);
  }

  /**
   * Returns the record of an open list of this agent.
   *
   * @throws `KV_TRANSFER_INVALID`, `KV_LIST_CLOSED`.
   */
  requireOpen(list: PreparedList, side: "local" | "remote"): PreparedListRecord {
    const subject = `the ${side} list`;
    if (typeof list !== "object" || list === null || !this.#known.has(list)) {
      throw new KvError(
        "KV_TRANSFER_INVALID",
        `${subject} was not prepared by agent ${this.#agentName}`,
      );
    }
    const record = this.#open.get(list);
    if (record === undefined || record.closing) {
      throw new KvError("KV_LIST_CLOSED", `${subject} of agent ${this.#agentName} is closed`);
    }
    if ((record.peer === undefined) !== (side === "local")) {
      const memory = record.peer === undefined ? "local memory" : `memory of ${record.peer.name}`;
      throw new KvError("KV_TRANSFER_INVALID", `${subject} describes ${memory}`);
    }
    return record;
  }

  /** Returns true when an open list refers to the memory. */
  refersTo(memory: MemoryRecord): boolean {
    return [...this.#open.values()].some((list) => list.rows.memories.has(memory));
  }

  /** Counts the open lists of a peer's memory. */
  countOf(remote: string): number {
    return [...this.#open.values()].filter((list) => list.remote === remote).length;
  }

  clear(): void {
    this.#open.clear();
  }

  #add(
    table: DescriptorTable,
    rows: DescriptorRows<DescribedMemory>,
    peer?: PeerAddress,
  ): PreparedListRecord {
    let closed: Promise<void> | undefined;
    const close = (): Promise<void> => {
      record.closing = true;
      closed ??= Promise.all([...record.users]).then(() => void this.#open.delete(record));
      return closed;
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
    this.#open.set(record, record);
    this.#known.add(record);
    return record;
  }
}

/** The checked rows of a list. They locate each descriptor. */
interface DescriptorRows<T> {
  readonly count: number;
  /** Memories that the rows refer to, each once. */
  readonly memories: ReadonlySet<T>;
  /** Address of a descriptor; `index` is 0 to `count` - 1. */
  addressOf(index: number): number;
  lengthOf(index: number): number;
}

/** Indices of descriptors are int32. */
const MAX_DESCRIPTORS = 2 ** 31 - 1;

interface CheckRowsOptions<T extends DescribedMemory> {
  readonly table: DescriptorTable;
  /** Agent that owns the memory, for messages. */
  readonly owner: string;
  /** Code for a row outside all registered memory. */
  readonly unknownCode: KvErrorCode;
  find(address: number, lengthBytes: number): T | undefined;
}

/**
 * Checks a table.
 *
 * @throws `KV_LIST_INVALID`, and `unknownCode`.
 */
function checkRows<T extends DescribedMemory>(options: CheckRowsOptions<T>): DescriptorRows<T> {
  const { table, owner } = options;
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
  /** Index of each row's first descriptor, and one more: the count. */
  const starts = new Float64Array(numRows + 1);
  const memories = new Set<T>();
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
    const memory = options.find(address, spanBytes);
    if (memory === undefined) {
      throw invalid(
        `${text} spans ${spanBytes} bytes outside all registered memory`,
        options.unknownCode,
      );
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
