import { open } from "node:fs/promises";
import { KvError, type Memory } from "@kv/interface";
import { formatValue, requireOptions } from "../validate.js";
import { registrableMemory } from "./registrable-memory.js";

/** How much of a file is used. */
export interface FileMemoryOptions {
  /**
   * Bytes that transfers may access, from the beginning of the file; at least 1. A shorter file is
   * extended.
   */
  readonly lengthBytes: number;
}

/**
 * Opens or creates a file as memory for a storage backend (`POSIX`, `GDS`), for transfers from and
 * to DRAM. Its list is `prepareRemote(agent.name, { memoryType: "FILE", rows })`, with offsets as
 * addresses and `deviceId` as the device. It has no `bytes`; `gather` and `scatter` reject with
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
  requireOptions(options, "KV_MEMORY_INVALID", "the description of a file", ["lengthBytes"]);
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
  return registrableMemory({
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
/** NIXL tells an agent's objects apart by device ids that the caller chooses. */
let lastDeviceId = 0;

/**
 * Describes an object by its key (1 to 1024 bytes) as memory for the backend `OBJ`, whose
 * parameters name the store and the bucket. Only transfers contact the store. Its list is
 * `prepareRemote(agent.name, { memoryType: "OBJ", rows })`, with offsets as addresses and
 * `deviceId` as the device. A READ may take parts; a WRITE replaces the object, so each row must
 * cover all of it. It has no `bytes`; `gather` and `scatter` reject with
 * `KV_TRANSPORT_UNSUPPORTED`. Throws `KV_MEMORY_INVALID`; `close` throws `KV_MEMORY_IN_USE` while
 * it is registered.
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
  requireOptions(options, "KV_MEMORY_INVALID", "the description of an object", ["lengthBytes"]);
  const lengthBytes = requireLength(options.lengthBytes);
  return registrableMemory({
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
