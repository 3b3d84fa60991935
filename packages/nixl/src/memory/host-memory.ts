import { constants } from "node:buffer";
// Not by name: a bundler would import each used name, and Node 20 lacks one of them.
import threads from "node:worker_threads";
import { KvError, type Memory, takeBuffer } from "@kv/interface";
import type { NativeAddon, NativeMemory } from "../addon/native.js";
import { callNative, fromNative } from "../addon/native-errors.js";
import { registrableMemory } from "./registrable-memory.js";

const NODE_MAJOR = Number(process.versions.node.split(".")[0]);

export interface HostMemoryOptions {
  /**
   * Touch the pages in the background: the first transfer of an untouched page is up to 20 times
   * slower. `register` waits for that.
   */
  readonly populate: boolean;
  /** Default: Node's own limit, which is 4 GiB on Node 20. */
  readonly maxViewBytes?: number | undefined;
}

/** Allocates page-aligned, zeroed host memory of any length. Throws `KV_MEMORY_INVALID`. */
export function allocateHostMemory(
  addon: NativeAddon,
  lengthBytes: number,
  options: HostMemoryOptions,
): Memory & Disposable {
  const native = callNative(() => new addon.Memory(lengthBytes, options.populate, undefined));
  const views = new MemoryViews(native, lengthBytes, options.maxViewBytes ?? constants.MAX_LENGTH);
  return registrableMemory({
    memoryType: "DRAM",
    address: callNative(() => native.address),
    lengthBytes,
    deviceId: 0,
    subject: `memory of ${lengthBytes} bytes`,
    kept: native,
    views,
    copies: copiesOf(native),
    onClose: () => views.close(),
  });
}

/**
 * Memory that is too long for one buffer has a buffer at every half of the longest length, so that
 * each part of up to half lies in one buffer. Buffers are made on demand and kept until `close`.
 */
class MemoryViews {
  readonly #native: NativeMemory;
  readonly #lengthBytes: number;
  readonly #maxBytes: number;
  readonly #buffers = new Map<number, ArrayBuffer>();
  #all: Uint8Array | undefined;

  constructor(native: NativeMemory, lengthBytes: number, maxBytes: number) {
    this.#native = native;
    this.#lengthBytes = lengthBytes;
    this.#maxBytes = maxBytes;
  }

  all(): Uint8Array {
    if (this.#all !== undefined) return this.#all;
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

/** Node 24 marks external buffers as untransferable, and detaching one ends the process. */
function canDetach(buffer: ArrayBuffer): boolean {
  const { isMarkedAsUntransferable } = threads as {
    isMarkedAsUntransferable?: (object: object) => boolean;
  };
  return NODE_MAJOR < 24 || isMarkedAsUntransferable?.(buffer) !== true;
}

export function copiesOf(native: NativeMemory): Pick<Memory, "gather" | "scatter"> {
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
