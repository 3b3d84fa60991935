import { KvError, type Memory } from "@kv/interface";
import { formatValue, requireObject } from "../validate.js";
import { externalMemory } from "./external-memory.js";

/** How long an object is. */
export interface ObjectMemoryOptions {
  /** Bytes of the object; at least 1. A WRITE makes the object this long. */
  readonly lengthBytes: number;
}

/** S3's limit. */
const MAX_KEY_BYTES = 1024;
/** NIXL identifies the objects of an agent by device ids that the caller chooses. */
let lastDeviceId = 0;

/**
 * Describes an object of an object store, by its key (1 to 1024 bytes), as memory that an agent with the backend `OBJ` can register. The
 * backend's parameters name the store and the bucket. The store is not contacted before a transfer. The list of the object is
 * `prepareRemote(agent.name, { memoryType: "OBJ", rows })`, with offsets in the object as addresses and `deviceId` as the device. A READ may
 * take parts of the object; a WRITE replaces it, so each row of its list must cover the whole object. It has no `bytes`; `gather` and
 * `scatter` reject with `KV_TRANSPORT_UNSUPPORTED`. Throws `KV_MEMORY_INVALID`; `close` throws `KV_MEMORY_IN_USE` while it is registered.
 */
export function objectMemory(key: string, options: ObjectMemoryOptions): Memory & Disposable {
  if (typeof key !== "string" || key === "" || key.includes("\0") || Buffer.byteLength(key) > MAX_KEY_BYTES) {
    throw new KvError(
      "KV_MEMORY_INVALID",
      `the key of an object is ${formatValue(key)}, not 1 to ${MAX_KEY_BYTES} bytes without NUL`,
    );
  }
  requireObject(options, "KV_MEMORY_INVALID", "the description of an object");
  const { lengthBytes } = options;
  if (!Number.isSafeInteger(lengthBytes) || lengthBytes <= 0) {
    throw new KvError(
      "KV_MEMORY_INVALID",
      `lengthBytes is ${formatValue(lengthBytes)}, not a positive integer`,
    );
  }
  return externalMemory({
    memoryType: "OBJ",
    address: 0,
    lengthBytes,
    deviceId: ++lastDeviceId,
    subject: `the object ${key}`,
    key,
  });
}
