import * as threads from "node:worker_threads";
import { KvError, type Memory } from "@kv/interface";
import type { NativeAddon, NativeMemory } from "../addon/native.js";
import { callNative, fromNative } from "../addon/native-errors.js";

const NODE_MAJOR = Number(process.versions.node.split(".")[0]);

const natives = new WeakMap<Memory, NativeMemory>();

/** The addon's memory behind memory of `allocate`. Throws `KV_MEMORY_INVALID` for memory of another transport, or of another copy of this package. */
export function nativeMemoryOf(memory: Memory): NativeMemory {
  const native = natives.get(memory);
  if (native === undefined) {
    throw new KvError("KV_MEMORY_INVALID", "this memory was not allocated by @kv/nixl", {
      hint: "allocate it with this transport's allocate()",
    });
  }
  return native;
}

/**
 * Allocates page-aligned, zeroed host memory. Its pages are touched in the background (the first transfer would be up to 20 times slower
 * otherwise); `register` waits for that. Throws `KV_MEMORY_INVALID`.
 */
export function allocateHostMemory(addon: NativeAddon, lengthBytes: number): Memory & Disposable {
  const native = callNative(() => new addon.Memory(lengthBytes));
  const buffer = callNative(() => native.buffer);
  // Peers read and write this memory, so it must not move to another thread with its buffer. Node 22 and newer refuse that by themselves.
  if (NODE_MAJOR < 22) threads.markAsUntransferable(buffer);
  const close = () => callNative(() => native.close(canDetach(buffer)));
  const memory: Memory & Disposable = {
    address: callNative(() => native.address),
    lengthBytes,
    memoryType: "DRAM",
    deviceId: 0,
    bytes: new Uint8Array(buffer),
    gather: (runs) => withKvErrors(() => native.gather(runs)),
    scatter: (runs, source) =>
      withKvErrors(() => {
        if ((source as { resizable?: boolean } | undefined)?.resizable === true) {
          throw new KvError("KV_MEMORY_INVALID", "the source of scatter is a resizable ArrayBuffer");
        }
        return native.scatter(runs, source);
      }),
    close,
    [Symbol.dispose]: close,
  };
  natives.set(memory, native);
  return Object.freeze(memory);
}

/** Node 24 marks external buffers as untransferable, and to detach such a buffer ends the process. */
function canDetach(buffer: ArrayBuffer): boolean {
  const { isMarkedAsUntransferable } = threads as { isMarkedAsUntransferable?: (object: object) => boolean };
  return NODE_MAJOR < 24 || isMarkedAsUntransferable?.(buffer) !== true;
}

async function withKvErrors<T>(call: () => Promise<T>): Promise<T> {
  try {
    return await call();
  } catch (error) {
    throw fromNative(error);
  }
}
