import { KvError, type Memory } from "@kv/interface";
import { requireObject, shown } from "../validate.js";
import { foreignMemory } from "./external-memory.js";

export interface ObjectMemoryOptions {
  /** Bytes of the object. A WRITE makes it as long. */
  readonly lengthBytes: number;
}

/** As S3 bounds them. */
const MAX_KEY_BYTES = 1024;
/** Objects have no number of their own: NIXL tells those of an agent by one that their user chooses. */
let lastDeviceId = 0;

/**
 * An object of a store, by its key, as memory that an agent with a storage backend for objects (`OBJ`) can register; the backend's parameters say
 * which store and bucket. Nothing is asked of the store until a transfer: its list is `prepareRemote(agent.name, { memoryType: "OBJ", rows })`
 * with places in the object as addresses and `deviceId` as the device. A READ may take parts of it. A WRITE replaces it: each row of the list is
 * all of an object. It has no `bytes`, and `gather` and `scatter` are `KV_TRANSPORT_UNSUPPORTED`. Errors: `KV_MEMORY_INVALID`.
 */
export function objectMemory(key: string, options: ObjectMemoryOptions): Memory {
  if (typeof key !== "string" || key === "" || key.includes("\0") || Buffer.byteLength(key) > MAX_KEY_BYTES) {
    throw new KvError(
      "KV_MEMORY_INVALID",
      `the key of an object is ${shown(key)}, not 1 to ${MAX_KEY_BYTES} bytes without NUL`,
    );
  }
  requireObject(options, "KV_MEMORY_INVALID", "what is known of an object");
  const { lengthBytes } = options;
  if (!Number.isSafeInteger(lengthBytes) || lengthBytes <= 0) {
    throw new KvError("KV_MEMORY_INVALID", `lengthBytes is ${shown(lengthBytes)}, not a positive integer`);
  }
  return foreignMemory({
    memoryType: "OBJ",
    address: 0,
    lengthBytes,
    deviceId: ++lastDeviceId,
    subject: `the object ${key}`,
    check: false,
    key,
  });
}
