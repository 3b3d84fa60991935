import { DESCRIPTOR_OFFSET, DESCRIPTOR_RUN, KvError, type TransferRequest } from "@kv/interface";
import type { MemoryMap, MemoryRecord } from "../memory/memory.js";

export interface CopySide {
  readonly name: string;
  readonly rows: {
    readonly count: number;
    addressOf(index: number): number;
    lengthOf(index: number): number;
  };
}

/** Byte ranges in the order of the pairs, merged where adjacent on both sides. */
export interface CopyPlan {
  readonly lengthBytes: number;
  readonly descriptorCount: number;
  readonly mergedCount: number;
  /**
   * Copies up to `lengthBytes` more bytes.
   *
   * @throws `KV_TRANSFER_FAILED` where memory is no longer registered.
   */
  copyNext(lengthBytes: number, from: MemoryMap<MemoryRecord>, to: MemoryMap<MemoryRecord>): void;
}

/**
 * Checks a transfer's descriptors and resolves their addresses. Does not keep the indices.
 *
 * @throws `KV_TRANSFER_INVALID`.
 */
export function copyPlan(request: TransferRequest, local: CopySide, remote: CopySide): CopyPlan {
  const reads = request.operation === "READ";
  const runsOfIds = checkedRuns(request, local, remote);
  const froms: number[] = [];
  const tos: number[] = [];
  const lengths: number[] = [];
  let total = 0;
  let descriptorCount = 0;
  for (let at = 0; at < runsOfIds.length; at += DESCRIPTOR_RUN) {
    const [firstLocal, firstRemote, count] = runsOfIds.subarray(
      at,
      at + DESCRIPTOR_RUN,
    ) as unknown as Run;
    for (let step = 0; step < count; step++) {
      const [localId, remoteId] = [firstLocal + step, firstRemote + step];
      const bytes = local.rows.lengthOf(localId);
      const remoteBytes = remote.rows.lengthOf(remoteId);
      if (bytes !== remoteBytes) {
        throw invalid(
          `pair ${descriptorCount + step}: local descriptor ${localId} has ${bytes} bytes, remote descriptor ${remoteId} has ${remoteBytes}`,
        );
      }
      const here = local.rows.addressOf(localId);
      const there = remote.rows.addressOf(remoteId);
      const [from, to] = reads ? [there, here] : [here, there];
      total += bytes;
      const last = lengths.length - 1;
      const lastLength = lengths[last] as number;
      if (last >= 0 && froms[last] === from - lastLength && tos[last] === to - lastLength) {
        lengths[last] = lastLength + bytes;
        continue;
      }
      froms.push(from);
      tos.push(to);
      lengths.push(bytes);
    }
    descriptorCount += count;
  }
  const runs = lengths.length;

  let run = 0;
  let offset = 0;
  return {
    lengthBytes: total,
    descriptorCount,
    mergedCount: runs,
    copyNext(lengthBytes, fromMap, toMap) {
      let left = lengthBytes;
      while (left > 0 && run < runs) {
        const from = (froms[run] as number) + offset;
        const to = (tos[run] as number) + offset;
        const bytes = Math.min(left, (lengths[run] as number) - offset);
        const fromMemory = mapped(fromMap, from, bytes);
        const toMemory = mapped(toMap, to, bytes);
        const fromOffset = from - fromMemory.address;
        toMemory.data.set(
          fromMemory.data.subarray(fromOffset, fromOffset + bytes),
          to - toMemory.address,
        );
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
    `${lengthBytes} bytes at 0x${address.toString(16)} are no longer registered`,
  );
}

type Run = [localId: number, remoteId: number, count: number];

function checkedRuns(request: TransferRequest, local: CopySide, remote: CopySide): Int32Array {
  const { runs, offsets, localIds, remoteIds } = request;
  if (runs !== undefined) {
    if (localIds !== undefined || remoteIds !== undefined)
      throw invalid("it has both pairs and runs");
    return repeatedRuns(
      rowsOf("runs", runs, DESCRIPTOR_RUN),
      offsets === undefined ? Int32Array.of(0, 0) : rowsOf("offsets", offsets, DESCRIPTOR_OFFSET),
      local,
      remote,
    );
  }
  if (offsets !== undefined) throw invalid("offsets need runs, and it has pairs");
  for (const [name, ids] of [
    ["localIds", localIds],
    ["remoteIds", remoteIds],
  ] as const) {
    if (!(ids instanceof Int32Array)) throw invalid(`${name} is not an Int32Array`);
  }
  const { length } = localIds;
  if (length !== remoteIds.length)
    throw invalid(`${length} localIds against ${remoteIds.length} remoteIds`);
  if (length === 0) throw invalid("it has no descriptors");
  const ones = new Int32Array(length * DESCRIPTOR_RUN);
  for (let index = 0; index < length; index++) {
    const pair = [localIds[index] as number, remoteIds[index] as number, 1];
    ones.set(pair, index * DESCRIPTOR_RUN);
  }
  return repeatedRuns(ones, Int32Array.of(0, 0), local, remote);
}

function rowsOf(name: string, numbers: unknown, perRow: number): Int32Array {
  if (!(numbers instanceof Int32Array)) throw invalid(`${name} is not an Int32Array`);
  if (numbers.length > 0 && numbers.length % perRow === 0) return numbers;
  throw invalid(
    `${name} needs at least one row, of ${perRow} numbers each; it has ${numbers.length} numbers`,
  );
}

function repeatedRuns(
  runs: Int32Array,
  offsets: Int32Array,
  local: CopySide,
  remote: CopySide,
): Int32Array {
  const out = new Int32Array((runs.length * offsets.length) / DESCRIPTOR_OFFSET);
  let cursor = 0;
  for (let offset = 0; offset < offsets.length; offset += DESCRIPTOR_OFFSET) {
    for (let at = 0; at < runs.length; at += DESCRIPTOR_RUN) {
      const count = runs[at + 2] as number;
      if (count < 1) throw invalid(`run ${at / DESCRIPTOR_RUN} has ${count} descriptors`);
      for (const [column, side] of [local, remote].entries()) {
        const id = (offsets[offset + column] as number) + (runs[at + column] as number);
        if (id < 0 || id + count > side.rows.count) {
          throw invalid(
            `run ${at / DESCRIPTOR_RUN} covers descriptors ${id} to ${id + count - 1} of the ${side.name} list, which has ${side.rows.count}`,
          );
        }
        out[cursor++] = id;
      }
      out[cursor++] = count;
    }
  }
  return out;
}

function invalid(message: string): KvError {
  return new KvError("KV_TRANSFER_INVALID", `invalid transfer: ${message}`);
}
