import { KvError, type Memory } from "@kv/interface";
import { loadAddon } from "../addon/load-addon.js";
import { callNative } from "../addon/native-errors.js";
import { formatValue, requireOptions } from "../validate.js";
import { addressOf, registrableMemory } from "./registrable-memory.js";

/** Host memory of the caller; see `hostMemory`. */
export interface HostMemoryDescription {
  /** Address of the first byte in this process. */
  readonly address: number | bigint;
  /** Bytes that transfers may access. */
  readonly lengthBytes: number;
  /**
   * What keeps the memory allocated, such as another addon's object. It is referenced until
   * `close`.
   */
  readonly owner: object;
}

/**
 * Describes host memory that another library allocated in this process. `register` rejects with
 * `KV_MEMORY_INVALID` unless the process can then read and write the whole range; nothing detects
 * that it is freed later. `bytes` is empty; `gather` and `scatter` reject with
 * `KV_TRANSPORT_UNSUPPORTED`. Throws `KV_MEMORY_INVALID`; `close` throws `KV_MEMORY_IN_USE` while
 * it is registered.
 */
export function hostMemory(description: HostMemoryDescription): Memory & Disposable {
  requireOptions(description, "KV_MEMORY_INVALID", "the description of host memory", [
    "address",
    "lengthBytes",
    "owner",
  ]);
  const { lengthBytes, owner } = description;
  const address = addressOf(description, invalid);
  if ((typeof owner !== "object" && typeof owner !== "function") || owner === null) {
    throw invalid(`owner is ${formatValue(owner)}, not the object that keeps the memory allocated`);
  }
  const subject = `host memory of ${lengthBytes} bytes at ${address}`;
  return registrableMemory({
    memoryType: "DRAM",
    address,
    lengthBytes,
    deviceId: 0,
    subject,
    owner,
  });
}

/**
 * A `SharedArrayBuffer` that an agent can register in place; it is referenced until `close`.
 * `bytes` and `view` access it; `gather` and `scatter` reject with `KV_TRANSPORT_UNSUPPORTED`.
 * Throws `KV_MEMORY_INVALID` for an empty or growable one and for other values: an `ArrayBuffer`
 * may be detached while peers write to it. Throws the errors of loading the addon; `close` throws
 * `KV_MEMORY_IN_USE` while it is registered.
 */
export function sharedMemory(buffer: SharedArrayBuffer): Memory & Disposable {
  if (Object.prototype.toString.call(buffer) !== "[object SharedArrayBuffer]") {
    throw new KvError("KV_MEMORY_INVALID", `${formatValue(buffer)} is not a SharedArrayBuffer`, {
      hint: "use memory of the transport's allocate(), or copy into a SharedArrayBuffer",
    });
  }
  const bytes = new Uint8Array(buffer);
  if (bytes.length === 0 || (buffer as { growable?: boolean }).growable === true) {
    throw invalid(
      bytes.length === 0 ? "the SharedArrayBuffer is empty" : "the SharedArrayBuffer can grow",
    );
  }
  const address = callNative(() => loadAddon().addressOf(bytes));
  const subject = `a SharedArrayBuffer of ${bytes.length} bytes`;
  return registrableMemory({
    memoryType: "DRAM",
    address,
    lengthBytes: bytes.length,
    deviceId: 0,
    subject,
    views: {
      all: () => bytes,
      part: (offset, length) => bytes.subarray(offset, offset + length),
    },
  });
}

const invalid = (why: string): KvError =>
  new KvError("KV_MEMORY_INVALID", `the description of host memory is wrong: ${why}`);
