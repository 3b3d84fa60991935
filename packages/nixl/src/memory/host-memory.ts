import { constants } from "node:buffer";
// Not by name: a bundler writes the names that are used into an import, and Node 20 lacks one of
// them.
import threads from "node:worker_threads";
import { KvError, type Memory, takeBuffer } from "@kv/interface";
import type { NativeAddon, NativeMemory } from "../addon/native.js";
import { callNative, fromNative } from "../addon/native-errors.js";
import { formatValue } from "../validate.js";

const NODE_MAJOR = Number(process.versions.node.split(".")[0]);

const natives = new WeakMap<Memory, NativeMemory>();

/**
 * The addon's memory behind memory of `allocate`. Throws `KV_MEMORY_INVALID` for memory of another
 * transport, or of another copy of this package.
 */
export function nativeMemoryOf(memory: Memory): NativeMemory {
  const native = natives.get(memory);
  if (native === undefined) {
    throw new KvError("KV_MEMORY_INVALID", "this memory was not allocated by @kv/nixl", {
      hint: "allocate it with this transport's allocate()",
    });
  }
  return native;
}

/** Options of `allocateHostMemory`. */
export interface HostMemoryOptions {
  /**
   * Touch the pages in the background: the first transfer would be up to 20 times slower otherwise.
   * `register` waits for that.
   */
  readonly populate: boolean;
  /** The most bytes of one view. Default: Node's own limit, which is 4 GiB on Node 20. */
  readonly maxViewBytes?: number | undefined;
}

/** Allocates page-aligned, zeroed host memory of any length. Throws `KV_MEMORY_INVALID`. */
export function allocateHostMemory(
  addon: NativeAddon,
  lengthBytes: number,
  options: HostMemoryOptions,
): Memory & Disposable {
  const native = callNative(() => new addon.Memory(lengthBytes, options.populate));
  const views = new MemoryViews(native, lengthBytes, options.maxViewBytes ?? constants.MAX_LENGTH);
  const close = () => views.close();
  const memory: Memory & Disposable = {
    address: callNative(() => native.address),
    lengthBytes,
    memoryType: "DRAM",
    deviceId: 0,
    get bytes() {
      return views.all();
    },
    view: (offsetBytes, viewBytes) => views.part(offsetBytes, viewBytes),
    ...copiesOf(native),
    close,
    [Symbol.dispose]: close,
  };
  natives.set(memory, native);
  return Object.freeze(memory);
}

/**
 * The views of one memory. A memory that is longer than a view may be has a buffer per half of that
 * length, each as long as a view may be, so that every part of up to half of it lies in one buffer.
 * Buffers are made when a view needs them, and kept until `close`.
 */
class MemoryViews {
  readonly #native: NativeMemory;
  readonly #lengthBytes: number;
  readonly #maxBytes: number;
  readonly #buffers = new Map<number, ArrayBuffer>();
  #all: Uint8Array | undefined;
  #closed = false;

  constructor(native: NativeMemory, lengthBytes: number, maxBytes: number) {
    this.#native = native;
    this.#lengthBytes = lengthBytes;
    this.#maxBytes = maxBytes;
  }

  all(): Uint8Array {
    if (this.#all !== undefined) return this.#all;
    if (this.#closed) return new Uint8Array(0);
    if (this.#lengthBytes > this.#maxBytes) {
      throw new KvError(
        "KV_MEMORY_INVALID",
        `a memory of ${this.#lengthBytes} bytes does not fit in one view, which has ${this.#maxBytes} bytes at most`,
        { hint: "take parts of it with view(offsetBytes, lengthBytes)" },
      );
    }
    this.#all = new Uint8Array(this.#bufferFrom(0));
    return this.#all;
  }

  part(offsetBytes: number, lengthBytes: number): Uint8Array {
    requirePart(offsetBytes, lengthBytes, this.#lengthBytes);
    if (this.#closed) throw new KvError("KV_MEMORY_INVALID", "the memory is closed");
    if (this.#lengthBytes <= this.#maxBytes)
      return this.all().subarray(offsetBytes, offsetBytes + lengthBytes);
    const half = Math.floor(this.#maxBytes / 2);
    if (lengthBytes > half) {
      throw new KvError(
        "KV_MEMORY_INVALID",
        `a view of ${lengthBytes} bytes is too long; a view of a memory of ${this.#lengthBytes} bytes has ${half} bytes at most`,
        { hint: "take several shorter views" },
      );
    }
    const from = offsetBytes - (offsetBytes % half);
    return new Uint8Array(this.#bufferFrom(from), offsetBytes - from, lengthBytes);
  }

  close(): void {
    const buffers = [...this.#buffers.values()];
    callNative(() => this.#native.close(buffers.every(canDetach)));
    this.#closed = true;
    this.#buffers.clear();
  }

  #bufferFrom(offsetBytes: number): ArrayBuffer {
    const existing = this.#buffers.get(offsetBytes);
    if (existing !== undefined) return existing;
    const lengthBytes = Math.min(this.#maxBytes, this.#lengthBytes - offsetBytes);
    const buffer = callNative(() => this.#native.buffer(offsetBytes, lengthBytes));
    // Peers read and write this memory, so it must not move to another thread with its buffer. Node
    // 22 and newer refuse that by themselves.
    if (NODE_MAJOR < 22) threads.markAsUntransferable(buffer);
    this.#buffers.set(offsetBytes, buffer);
    return buffer;
  }
}

/** Throws `KV_MEMORY_INVALID` for a view that does not lie in a memory of `memoryBytes` bytes. */
export function requirePart(offsetBytes: number, lengthBytes: number, memoryBytes: number): void {
  const areIntegers = Number.isSafeInteger(offsetBytes) && Number.isSafeInteger(lengthBytes);
  if (
    areIntegers &&
    offsetBytes >= 0 &&
    lengthBytes >= 0 &&
    offsetBytes + lengthBytes <= memoryBytes
  )
    return;
  throw new KvError(
    "KV_MEMORY_INVALID",
    `a view of ${formatValue(lengthBytes)} bytes from ${formatValue(offsetBytes)} on does not lie in a memory of ${memoryBytes} bytes`,
  );
}

/**
 * Node 24 marks external buffers as untransferable, and to detach such a buffer ends the process.
 */
function canDetach(buffer: ArrayBuffer): boolean {
  const { isMarkedAsUntransferable } = threads as {
    isMarkedAsUntransferable?: (object: object) => boolean;
  };
  return NODE_MAJOR < 24 || isMarkedAsUntransferable?.(buffer) !== true;
}

/** Copies between memory of the addon and buffers. */
export function copiesOf(
  native: Pick<NativeMemory, "gather" | "scatter">,
): Pick<Memory, "gather" | "scatter"> {
  return {
    gather: (runs) => withKvErrors(() => native.gather(runs)),
    scatter: (runs, source) =>
      withKvErrors(() => {
        if ((source as { resizable?: boolean } | undefined)?.resizable === true) {
          throw new KvError(
            "KV_MEMORY_INVALID",
            "the source of scatter is a resizable ArrayBuffer",
          );
        }
        return native.scatter(runs, source, takeBuffer);
      }),
  };
}

async function withKvErrors<T>(call: () => Promise<T>): Promise<T> {
  try {
    return await call();
  } catch (error) {
    throw fromNative(error);
  }
}
