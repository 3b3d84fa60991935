import {
  DESCRIPTOR_ROW,
  type DescriptorTable,
  KvError,
  type KvErrorCode,
  type MemoryType,
  takeRows,
} from "@kv/interface";
import type { DescribedMemory } from "./metadata.js";

/** The rows of a list, checked once, and where each descriptor is. */
export interface DescriptorRows<T> {
  readonly count: number;
  /** The memories that rows name, each once. */
  readonly memories: ReadonlySet<T>;
  /** For an index from 0 to `count` - 1. */
  addressOf(index: number): number;
  lengthOf(index: number): number;
}

/** Ids are int32, as NIXL's. */
const MOST_DESCRIPTORS = 2 ** 31 - 1;

export interface CheckRowsOptions<T extends DescribedMemory> {
  readonly table: DescriptorTable;
  /** Whose memory it is, for messages. */
  readonly owner: string;
  /** The code when a row is of no memory known. */
  readonly unknownCode: KvErrorCode;
  find(address: number, lengthBytes: number): T | undefined;
}

export function checkRows<T extends DescribedMemory>(options: CheckRowsOptions<T>): DescriptorRows<T> {
  const { table, owner } = options;
  const memoryType: MemoryType = table.memoryType;
  const refuse = (message: string, code: KvErrorCode = "KV_LIST_INVALID"): KvError =>
    new KvError(code, `a list of ${owner}'s memory: ${message}`);
  if (memoryType !== "DRAM" && memoryType !== "VRAM") throw refuse(`memory type ${String(memoryType)}`);
  if (!(table.rows instanceof Float64Array)) throw refuse("its rows are not a Float64Array");
  const rows = table.takeRows ? takeRows(table.rows) : table.rows.slice();
  if (rows.length === 0 || rows.length % DESCRIPTOR_ROW !== 0) {
    throw refuse(`${rows.length} numbers are no rows of ${DESCRIPTOR_ROW}`);
  }
  const numRows = rows.length / DESCRIPTOR_ROW;
  /** Index of each row's first descriptor, and one more: the count. */
  const starts = new Float64Array(numRows + 1);
  const memories = new Set<T>();
  for (let row = 0; row < numRows; row++) {
    const at = row * DESCRIPTOR_ROW;
    const [address, length, device, stride, count] = rows.subarray(at, at + DESCRIPTOR_ROW) as unknown as Row;
    const text = `row ${row} [${address}, ${length}, ${device}, ${stride}, ${count}]`;
    if (![address, length, device, stride, count].every((n) => Number.isSafeInteger(n) && n >= 0)) {
      throw refuse(`${text} holds a number that is not whole or is below 0`);
    }
    if (length === 0 || count === 0) throw refuse(`${text} is empty`);
    const spanBytes = (count - 1) * stride + length;
    const memory = options.find(address, spanBytes);
    if (memory === undefined) {
      throw refuse(`${text} spans ${spanBytes} bytes that lie in no registered memory`, options.unknownCode);
    }
    if (memory.memoryType !== memoryType || memory.deviceId !== device) {
      throw refuse(
        `${text} is ${memory.memoryType} of device ${memory.deviceId}, the list says ${memoryType} of device ${device}`,
      );
    }
    memories.add(memory);
    starts[row + 1] = (starts[row] as number) + count;
  }
  const total = starts[numRows] as number;
  if (total > MOST_DESCRIPTORS) throw refuse(`${total} descriptors are more than ${MOST_DESCRIPTORS}`);

  let lastRow = 0;
  function rowOf(index: number): number {
    if (index >= (starts[lastRow] as number) && index < (starts[lastRow + 1] as number)) return lastRow;
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
