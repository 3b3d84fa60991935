import * as threads from "node:worker_threads";
import { KvError, type Memory } from "@kv/interface";
import type { NativeAddon, NativeMemory } from "../addon/native.js";
import { callNative, fromNative } from "../addon/native-errors.js";

const nodeMajor = Number(process.versions.node.split(".")[0]);

/** Whether Node holds the buffer fast, as 24 does with memory that is not its own: to detach it would end the process. */
const isMarked = (buffer: ArrayBuffer): boolean =>
  (threads as { isMarkedAsUntransferable?: (object: object) => boolean }).isMarkedAsUntransferable?.(
    buffer,
  ) ?? false;

const natives = new WeakMap<Memory, NativeMemory>();

/** The addon's memory behind one that `allocate` made. Errors: `KV_MEMORY_INVALID`. */
export function nativeOf(memory: Memory): NativeMemory {
  const native = natives.get(memory);
  if (native === undefined) {
    throw new KvError("KV_MEMORY_INVALID", "this memory was not allocated by @kv/nixl", {
      hint: "allocate it with this transport's allocate()",
    });
  }
  return native;
}

/** Page-aligned, zeroed memory; its pages are touched in the background, and `register` waits for that. */
export function allocateMemory(addon: NativeAddon, lengthBytes: number): Memory {
  const native = callNative(() => new addon.Memory(lengthBytes));
  const buffer = callNative(() => native.buffer);
  // What a peer reads and writes must not move to another thread with the buffer. Node 22 and newer refuse that by themselves.
  if (nodeMajor < 22) threads.markAsUntransferable(buffer);
  const memory: Memory = {
    address: callNative(() => native.address),
    lengthBytes,
    memoryType: "DRAM",
    deviceId: 0,
    bytes: new Uint8Array(buffer),
    gather: (runs) => promised(() => native.gather(runs)),
    scatter: (runs, source) =>
      promised(() => {
        if ((source as { resizable?: boolean } | undefined)?.resizable === true) {
          throw new KvError("KV_MEMORY_INVALID", "the source of scatter is a resizable ArrayBuffer");
        }
        return native.scatter(runs, source);
      }),
    close: () => callNative(() => native.close(nodeMajor < 24 || !isMarked(buffer))),
  };
  natives.set(memory, native);
  return Object.freeze(memory);
}

async function promised<T>(call: () => Promise<T>): Promise<T> {
  try {
    return await call();
  } catch (error) {
    throw fromNative(error);
  }
}
