import { open } from "node:fs/promises";
import { KvError, type Memory } from "@kv/interface";
import { formatValue, requireObject } from "../validate.js";
import { externalMemory } from "./external-memory.js";

/** How much of a file is used. */
export interface FileMemoryOptions {
  /**
   * Bytes that transfers may access, from the beginning of the file; at least 1. A shorter file is
   * extended to this length.
   */
  readonly lengthBytes: number;
}

/**
 * Opens a file, or creates it, as memory that an agent with a storage backend (`POSIX`, `GDS`) can
 * register. Transfers move bytes between the file and DRAM: its list is
 * `prepareRemote(agent.name, { memoryType: "FILE", rows })`, with offsets in the file as addresses
 * and `deviceId` as the device. It has no `bytes`; `gather` and `scatter` reject with
 * `KV_TRANSPORT_UNSUPPORTED`. Rejects with `KV_MEMORY_INVALID`; `close` throws `KV_MEMORY_IN_USE`
 * while it is registered.
 */
export async function openFileMemory(
  path: string,
  options: FileMemoryOptions,
): Promise<Memory & Disposable> {
  if (typeof path !== "string") {
    throw new KvError(
      "KV_MEMORY_INVALID",
      `the path of a file is ${formatValue(path)}, not a string`,
    );
  }
  requireObject(options, "KV_MEMORY_INVALID", "the description of a file");
  const lengthBytes = requireLength(options.lengthBytes);
  const failed = (action: string) => (cause: unknown) => {
    throw new KvError("KV_MEMORY_INVALID", `${path} could not be ${action}: ${String(cause)}`, {
      cause,
    });
  };
  const handle = await open(path, "r+")
    .catch((error: NodeJS.ErrnoException) =>
      error.code === "ENOENT" ? open(path, "wx+") : Promise.reject(error),
    )
    .catch(failed("opened for reading and writing"));
  try {
    if ((await handle.stat()).size < lengthBytes) await handle.truncate(lengthBytes);
  } catch (error) {
    await handle.close();
    failed(`extended to ${lengthBytes} bytes`)(error);
  }
  return externalMemory({
    memoryType: "FILE",
    address: 0,
    lengthBytes,
    deviceId: handle.fd,
    subject: `the file ${path}`,
    onClose: () => void handle.close(),
  });
}

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
 * Describes an object of an object store, by its key (1 to 1024 bytes), as memory that an agent
 * with the backend `OBJ` can register. The backend's parameters name the store and the bucket. The
 * store is not contacted before a transfer. The list of the object is
 * `prepareRemote(agent.name, { memoryType: "OBJ", rows })`, with offsets in the object as addresses
 * and `deviceId` as the device. A READ may take parts of the object; a WRITE replaces it, so each
 * row of its list must cover the whole object. It has no `bytes`; `gather` and `scatter` reject
 * with `KV_TRANSPORT_UNSUPPORTED`. Throws `KV_MEMORY_INVALID`; `close` throws `KV_MEMORY_IN_USE`
 * while it is registered.
 */
export function objectMemory(key: string, options: ObjectMemoryOptions): Memory & Disposable {
  if (
    typeof key !== "string" ||
    key === "" ||
    key.includes("\0") ||
    Buffer.byteLength(key) > MAX_KEY_BYTES
  ) {
    throw new KvError(
      "KV_MEMORY_INVALID",
      `the key of an object is ${formatValue(key)}, not 1 to ${MAX_KEY_BYTES} bytes without NUL`,
    );
  }
  requireObject(options, "KV_MEMORY_INVALID", "the description of an object");
  const lengthBytes = requireLength(options.lengthBytes);
  return externalMemory({
    memoryType: "OBJ",
    address: 0,
    lengthBytes,
    deviceId: ++lastDeviceId,
    subject: `the object ${key}`,
    key,
  });
}

function requireLength(lengthBytes: number): number {
  if (Number.isSafeInteger(lengthBytes) && lengthBytes > 0) return lengthBytes;
  throw new KvError(
    "KV_MEMORY_INVALID",
    `lengthBytes is ${formatValue(lengthBytes)}, not a positive integer`,
  );
}
