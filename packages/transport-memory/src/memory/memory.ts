import { KvError, type Memory, type MemoryType, takeBuffer } from "@kv/interface";
import type { MemoryHost } from "../network/host.js";

export interface MemoryRecord extends Memory, Disposable {
  readonly host: MemoryHost;
  readonly closed: boolean;
  /** The bytes, even of memory types without `bytes`. */
  readonly data: Uint8Array;
  registrations: number;
}

export interface AllocateOptions {
  readonly host: MemoryHost;
  readonly address: number;
  readonly lengthBytes: number;
  readonly memoryType: MemoryType;
  readonly deviceId: number;
  readonly closed: (memory: MemoryRecord) => void;
}

export function allocateMemory(options: AllocateOptions): MemoryRecord {
  const { address, lengthBytes, memoryType } = options;
  let data = newBytes(lengthBytes);
  let closed = false;
  const name = `memory at 0x${address.toString(16)} (${lengthBytes} bytes of ${memoryType})`;

  function open(): Uint8Array {
    if (closed) throw new KvError("KV_MEMORY_INVALID", `${name} is closed`);
    return data;
  }

  const memory: MemoryRecord = {
    host: options.host,
    address,
    lengthBytes,
    memoryType,
    deviceId: options.deviceId,
    registrations: 0,
    get closed() {
      return closed;
    },
    get data() {
      return data;
    },
    get bytes() {
      if (memoryType !== "DRAM") {
        throw new KvError("KV_MEMORY_INVALID", `${name} is not addressable by the process`, {
          hint: "use gather and scatter",
        });
      }
      return data;
    },
    view(offsetBytes, viewBytes) {
      const whole = open();
      if (memoryType !== "DRAM") return memory.bytes;
      if (![offsetBytes, viewBytes].every((n) => Number.isSafeInteger(n) && n >= 0)) {
        throw new KvError("KV_MEMORY_INVALID", `${name}: a view of [${offsetBytes}, ${viewBytes}]`);
      }
      if (offsetBytes + viewBytes > lengthBytes) {
        throw new KvError(
          "KV_MEMORY_INVALID",
          `${name}: a view ends at ${offsetBytes + viewBytes}`,
        );
      }
      return whole.subarray(offsetBytes, offsetBytes + viewBytes);
    },
    async gather(runs) {
      const source = open();
      const out = new Uint8Array(checkRuns(name, runs, lengthBytes));
      let at = 0;
      for (let index = 0; index < runs.length; index += 2) {
        const offset = runs[index] as number;
        const length = runs[index + 1] as number;
        out.set(source.subarray(offset, offset + length), at);
        at += length;
      }
      return out.buffer;
    },
    async scatter(runs, from) {
      const target = open();
      const total = checkRuns(name, runs, lengthBytes);
      if (total !== from.byteLength) {
        throw new KvError(
          "KV_MEMORY_INVALID",
          `scatter into ${name}: the runs take ${total} bytes, the source has ${from.byteLength}`,
        );
      }
      // As if another thread copied: tests notice a caller that reuses the source.
      const bytes = new Uint8Array(takeBuffer(from));
      let at = 0;
      for (let index = 0; index < runs.length; index += 2) {
        const length = runs[index + 1] as number;
        target.set(bytes.subarray(at, at + length), runs[index] as number);
        at += length;
      }
      return bytes.buffer;
    },
    close() {
      if (closed) return;
      if (memory.registrations > 0) {
        throw new KvError(
          "KV_MEMORY_IN_USE",
          `${name} has ${memory.registrations} open registrations`,
          {
            hint: "close its registrations first",
          },
        );
      }
      closed = true;
      // Detaching the buffer empties every view of it.
      const { buffer } = data;
      structuredClone(buffer, { transfer: [buffer] });
      data = new Uint8Array(0);
      options.closed(memory);
    },
    [Symbol.dispose]() {
      memory.close();
    },
  };
  return memory;
}

function newBytes(lengthBytes: number): Uint8Array<ArrayBuffer> {
  try {
    return new Uint8Array(lengthBytes);
  } catch (cause) {
    throw new KvError("KV_MEMORY_INVALID", `${lengthBytes} bytes cannot be allocated`, { cause });
  }
}

function checkRuns(name: string, runs: Float64Array, lengthBytes: number): number {
  if (!(runs instanceof Float64Array) || runs.length % 2 !== 0) {
    throw new KvError(
      "KV_MEMORY_INVALID",
      `${name}: runs are rows of [offsetBytes, lengthBytes] in a Float64Array`,
    );
  }
  let total = 0;
  for (let index = 0; index < runs.length; index += 2) {
    const offset = runs[index] as number;
    const length = runs[index + 1] as number;
    if (
      !Number.isSafeInteger(offset) ||
      !Number.isSafeInteger(length) ||
      offset < 0 ||
      length < 0
    ) {
      throw new KvError("KV_MEMORY_INVALID", `${name}: run ${index / 2} is [${offset}, ${length}]`);
    }
    if (offset + length > lengthBytes) {
      throw new KvError(
        "KV_MEMORY_INVALID",
        `${name}: run ${index / 2} ends at ${offset + length}`,
      );
    }
    total += length;
    if (total > lengthBytes) {
      throw new KvError(
        "KV_MEMORY_INVALID",
        `${name}: the runs have more bytes together, so some repeat`,
      );
    }
  }
  return total;
}

interface Span {
  readonly address: number;
  readonly lengthBytes: number;
}

export class MemoryMap<T extends Span> {
  readonly #memories: Set<T>;
  /** Consecutive descriptors mostly lie in one memory. */
  #last: T | undefined;

  constructor(memories: Iterable<T> = []) {
    this.#memories = new Set(memories);
  }

  get size(): number {
    return this.#memories.size;
  }

  add(memory: T): void {
    this.#memories.add(memory);
  }

  delete(memory: T): void {
    this.#memories.delete(memory);
    this.#last = undefined;
  }

  /** The memory with all of `[address, address + lengthBytes)`. */
  find(address: number, lengthBytes: number): T | undefined {
    const holds = (memory: T) =>
      address >= memory.address && address + lengthBytes <= memory.address + memory.lengthBytes;
    if (this.#last !== undefined && holds(this.#last)) return this.#last;
    for (const memory of this.#memories) {
      if (!holds(memory)) continue;
      this.#last = memory;
      return memory;
    }
    return undefined;
  }

  values(): T[] {
    return [...this.#memories];
  }
}
