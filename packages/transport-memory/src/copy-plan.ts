import { KvError } from "@kv/interface";
import type { MemoryRecord } from "./memory.js";
import type { MemoryMap } from "./memory-map.js";

/** A side of a transfer: descriptors, and which of them. */
export interface CopySide {
  readonly name: string;
  readonly ids: Int32Array;
  readonly rows: {
    readonly count: number;
    addressOf(index: number): number;
    lengthOf(index: number): number;
  };
}

/** Runs of bytes to copy, in the order of the ids; neighbours on both sides are one run. */
export interface CopyPlan {
  readonly lengthBytes: number;
  /** Copies up to `lengthBytes` further bytes from where the last call ended. */
  land(lengthBytes: number, from: MemoryMap<MemoryRecord>, to: MemoryMap<MemoryRecord>): void;
}

/** Checks both id arrays and pairs them. Errors: `KV_TRANSFER_INVALID`. Addresses are kept, so that the ids need not be. */
export function copyPlan(source: CopySide, target: CopySide): CopyPlan {
  for (const { name, ids } of [source, target]) {
    if (!(ids instanceof Int32Array)) throw invalid(`${name}Ids is not an Int32Array`);
  }
  const { length } = source.ids;
  if (length !== target.ids.length) {
    throw invalid(`${length} ${source.name}Ids against ${target.ids.length} ${target.name}Ids`);
  }
  if (length === 0) throw invalid("it names no descriptor");
  const froms = new Float64Array(length);
  const tos = new Float64Array(length);
  const lengths = new Float64Array(length);
  let runs = 0;
  let total = 0;
  for (let index = 0; index < length; index++) {
    const sourceId = checkId(source, index);
    const targetId = checkId(target, index);
    const bytes = source.rows.lengthOf(sourceId);
    const targetBytes = target.rows.lengthOf(targetId);
    if (bytes !== targetBytes) {
      throw invalid(
        `pair ${index}: ${source.name} descriptor ${sourceId} has ${bytes} bytes, ${target.name} descriptor ${targetId} has ${targetBytes}`,
      );
    }
    const from = source.rows.addressOf(sourceId);
    const to = target.rows.addressOf(targetId);
    total += bytes;
    const last = runs - 1;
    const lastLength = lengths[last] as number;
    if (runs > 0 && froms[last] === from - lastLength && tos[last] === to - lastLength) {
      lengths[last] = lastLength + bytes;
      continue;
    }
    froms[runs] = from;
    tos[runs] = to;
    lengths[runs] = bytes;
    runs += 1;
  }

  let run = 0;
  let offset = 0;
  return {
    lengthBytes: total,
    land(lengthBytes, fromMap, toMap) {
      let left = lengthBytes;
      while (left > 0 && run < runs) {
        const from = (froms[run] as number) + offset;
        const to = (tos[run] as number) + offset;
        const bytes = Math.min(left, (lengths[run] as number) - offset);
        const fromMemory = mapped(fromMap, from, bytes);
        const toMemory = mapped(toMap, to, bytes);
        const fromOffset = from - fromMemory.address;
        toMemory.data.set(fromMemory.data.subarray(fromOffset, fromOffset + bytes), to - toMemory.address);
        left -= bytes;
        offset += bytes;
        if (offset === lengths[run]) {
          run += 1;
          offset = 0;
        }
      }
    },
  };
}

function mapped(map: MemoryMap<MemoryRecord>, address: number, lengthBytes: number): MemoryRecord {
  const memory = map.find(address, lengthBytes);
  if (memory !== undefined) return memory;
  throw new KvError(
    "KV_TRANSFER_FAILED",
    `${lengthBytes} bytes at 0x${address.toString(16)} are no longer registered by their agent`,
  );
}

function checkId(side: CopySide, index: number): number {
  const id = side.ids[index] as number;
  if (id >= 0 && id < side.rows.count) return id;
  throw invalid(`${side.name}Ids[${index}] is ${id}, the list has ${side.rows.count} descriptors`);
}

function invalid(message: string): KvError {
  return new KvError("KV_TRANSFER_INVALID", `a transfer cannot begin: ${message}`);
}
