import { KvError, type Memory } from "@kv/interface";
import { loadAddon } from "../addon/load-addon.js";
import { callNative } from "../addon/native-errors.js";
import { formatValue, requireObject } from "../validate.js";
import { externalMemory } from "./external-memory.js";

/** Host memory of the caller; see `hostMemory`. */
export interface HostMemoryDescription {
  /** Address of the first byte in this process. */
  readonly address: number | bigint;
  /** Bytes that transfers may access. */
  readonly lengthBytes: number;
  /**
   * What keeps the memory allocated, such as the object of another addon. It is not collected until
   * `close`.
   */
  readonly owner: object;
}

/**
 * Describes host memory that another library has allocated in this process, as memory that an agent
 * can register where it is. `owner` keeps it allocated: it stays referenced until `close`.
 * `register` rejects with `KV_MEMORY_INVALID` unless the process can read and write the whole range
 * at that moment; nothing detects that it is freed later. JavaScript cannot access the bytes
 * through it: `bytes` is empty, `gather` and `scatter` reject with `KV_TRANSPORT_UNSUPPORTED`.
 * Throws `KV_MEMORY_INVALID`; `close` throws `KV_MEMORY_IN_USE` while it is registered.
 */
export function hostMemory(description: HostMemoryDescription): Memory & Disposable {
  requireObject(description, "KV_MEMORY_INVALID", "the description of host memory");
  const { address, lengthBytes, owner } = description;
  const first = typeof address === "bigint" ? Number(address) : address;
  if (!Number.isSafeInteger(first) || first <= 0) {
    throw invalid(`address is ${formatValue(address)}, not an integer from 1 to 2^53 - 1`);
  }
  if (
    !Number.isSafeInteger(lengthBytes) ||
    lengthBytes <= 0 ||
    !Number.isSafeInteger(first + lengthBytes)
  ) {
    throw invalid(
      `lengthBytes is ${formatValue(lengthBytes)}, not a positive integer that ends below 2^53`,
    );
  }
  if ((typeof owner !== "object" && typeof owner !== "function") || owner === null) {
    throw invalid(`owner is ${formatValue(owner)}, not the object that keeps the memory allocated`);
  }
  const subject = `host memory of ${lengthBytes} bytes at ${first}`;
  return externalMemory({
    memoryType: "DRAM",
    address: first,
    lengthBytes,
    deviceId: 0,
    subject,
    owner,
  });
}

/**
 * A `SharedArrayBuffer` as memory that an agent can register where it is. `bytes` and `view` read
 * and write it, as every thread that has the buffer does; `gather` and `scatter` reject with
 * `KV_TRANSPORT_UNSUPPORTED`. The buffer is not collected until `close`. Throws `KV_MEMORY_INVALID`
 * for other values (an `ArrayBuffer` may be detached while peers write to it), for one that can
 * grow, and for an empty one; throws what loading the addon may fail with; `close` throws
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
  return externalMemory({
    memoryType: "DRAM",
    address,
    lengthBytes: bytes.length,
    deviceId: 0,
    subject,
    bytes,
  });
}

const invalid = (why: string): KvError =>
  new KvError("KV_MEMORY_INVALID", `the description of host memory is wrong: ${why}`);
