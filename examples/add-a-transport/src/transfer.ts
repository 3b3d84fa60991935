import {
  DESCRIPTOR_OFFSET,
  DESCRIPTOR_RUN,
  KvError,
  type Transfer,
  type TransferRequest,
  type TransferResult,
} from "@kv/interface";
import type { LoopbackList } from "./lists.js";

/** Index of a local descriptor, and index of the remote one. */
type Pair = readonly [local: number, remote: number];

export interface Copier {
  /** Returns the bytes at an address of registered memory. Errors: `KV_TRANSFER_FAILED`. */
  at(agent: string, address: number, lengthBytes: number): Uint8Array;
}

export interface TransferParts {
  readonly request: TransferRequest;
  readonly agent: string;
  readonly copier: Copier;
  readonly deliver: (remote: string, payload: Uint8Array) => void;
}

export function checkTransfer(
  request: TransferRequest,
  agent: string,
): { local: LoopbackList; remote: LoopbackList; pairs: readonly Pair[] } {
  const { operation, timeoutMs, notification } = request;
  const local = request.local as LoopbackList;
  const remote = request.remote as LoopbackList;
  const invalid = (reason: string) =>
    new KvError("KV_TRANSFER_INVALID", `invalid transfer: ${reason}`);
  if (operation !== "READ" && operation !== "WRITE") throw invalid(`operation ${operation}`);
  if (local.owner !== agent || remote.owner !== agent)
    throw invalid("a list belongs to another agent");
  if (local.remote !== undefined || remote.remote === undefined)
    throw invalid("local and remote are swapped");
  if (local.closed || remote.closed)
    throw new KvError("KV_LIST_CLOSED", "a list of the transfer is closed");
  if (timeoutMs !== undefined && !(timeoutMs >= 0)) throw invalid(`timeoutMs ${timeoutMs}`);
  if (notification !== undefined && !(notification instanceof Uint8Array))
    throw invalid("the notification is not a Uint8Array");
  // Check runs before expanding them: a run may have any count.
  const most = Math.min(local.count, remote.count);
  const pairs = pairsOf(request, most, invalid);
  pairs.forEach(([localId, remoteId], index) => {
    const [here, there] = [local.lengths[localId], remote.lengths[remoteId]];
    if (here === undefined || here !== there)
      throw invalid(`pair ${index} has ${here} and ${there} bytes`);
  });
  return { local, remote, pairs };
}

function pairsOf(
  request: TransferRequest,
  most: number,
  invalid: (reason: string) => KvError,
): readonly Pair[] {
  const { localIds, remoteIds, runs, offsets = Int32Array.of(0, 0) } = request;
  if (runs === undefined) {
    if (request.offsets !== undefined) throw invalid("offsets need runs, and it has ids");
    if (!(localIds instanceof Int32Array) || !(remoteIds instanceof Int32Array))
      throw invalid("ids must be Int32Arrays");
    if (localIds.length === 0 || localIds.length !== remoteIds.length) {
      throw invalid(`${localIds.length} local and ${remoteIds.length} remote ids`);
    }
    return Array.from(localIds, (localId, index): Pair => [localId, remoteIds[index] ?? -1]);
  }
  if (localIds !== undefined || remoteIds !== undefined) throw invalid("it has both ids and runs");
  for (const [rows, perRow] of [
    [runs, DESCRIPTOR_RUN],
    [offsets, DESCRIPTOR_OFFSET],
  ] as const) {
    if (!(rows instanceof Int32Array) || rows.length === 0 || rows.length % perRow !== 0) {
      throw invalid(
        `runs and offsets are rows of ${DESCRIPTOR_RUN} and ${DESCRIPTOR_OFFSET} in an Int32Array`,
      );
    }
  }
  const pairs: Pair[] = [];
  for (let row = 0; row < offsets.length; row += DESCRIPTOR_OFFSET) {
    const [here = 0, there = 0] = offsets.subarray(row, row + DESCRIPTOR_OFFSET);
    for (let at = 0; at < runs.length; at += DESCRIPTOR_RUN) {
      const [localId = 0, remoteId = 0, count = 0] = runs.subarray(at, at + DESCRIPTOR_RUN);
      if (count < 1 || count > most) throw invalid(`a run of ${count} descriptors`);
      for (let step = 0; step < count; step++)
        pairs.push([here + localId + step, there + remoteId + step]);
    }
  }
  return pairs;
}

export function startTransfer(
  parts: TransferParts,
  { local, remote, pairs }: ReturnType<typeof checkTransfer>,
): Transfer {
  const { request, agent, copier, deliver } = parts;
  const { operation, signal, timeoutMs } = request;
  const notification = request.notification?.slice();
  const peer = remote.remote ?? "";
  const startedAtMs = performance.now();
  let release = () => {};
  const released = new Promise<void>((resolve) => {
    release = resolve;
  });
  for (const list of [local, remote]) list.transfers.add(released);

  function copy(): number {
    let lengthBytes = 0;
    for (const [localId, remoteId] of pairs) {
      const length = local.lengths[localId] ?? 0;
      const here = copier.at(agent, local.addresses[localId] ?? 0, length);
      const there = copier.at(peer, remote.addresses[remoteId] ?? 0, length);
      if (operation === "READ") here.set(there);
      else there.set(here);
      lengthBytes += length;
    }
    return lengthBytes;
  }

  const done = new Promise<TransferResult>((resolve, reject) => {
    const copying = setImmediate(() => {
      try {
        const lengthBytes = copy();
        if (notification !== undefined) deliver(peer, notification);
        const elapsedMs = performance.now() - startedAtMs;
        end();
        resolve({
          lengthBytes,
          descriptorCount: pairs.length,
          postMs: elapsedMs,
          transferMs: elapsedMs,
        });
      } catch (error) {
        fail(error);
      }
    });
    const late = () => fail(new KvError("KV_TRANSFER_TIMEOUT", `not done after ${timeoutMs} ms`));
    const timer = timeoutMs === undefined ? undefined : setTimeout(late, timeoutMs);
    const abort = () =>
      fail(
        new KvError("KV_TRANSFER_ABORTED", "the transfer was aborted", { cause: signal?.reason }),
      );
    if (signal?.aborted) abort();
    else signal?.addEventListener("abort", abort);

    function fail(error: unknown): void {
      end();
      reject(error);
    }
    function end(): void {
      clearImmediate(copying);
      clearTimeout(timer);
      signal?.removeEventListener("abort", abort);
      for (const list of [local, remote]) list.transfers.delete(released);
      release();
    }
  });
  // A caller that only awaits `released` must not cause an unhandled rejection.
  done.catch(() => {});
  return { done, released };
}
