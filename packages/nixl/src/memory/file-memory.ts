import { open } from "node:fs/promises";
import { KvError, type Memory } from "@kv/interface";
import { formatValue, requireObject } from "../validate.js";
import { externalMemory } from "./external-memory.js";

/** How much of a file is used. */
export interface FileMemoryOptions {
  /** Bytes that transfers may access, from the beginning of the file; at least 1. A shorter file is extended to this length. */
  readonly lengthBytes: number;
}

/**
 * Opens a file, or creates it, as memory that an agent with a storage backend (`POSIX`, `GDS`) can register. Transfers move bytes between the
 * file and DRAM: its list is `prepareRemote(agent.name, { memoryType: "FILE", rows })`, with offsets in the file as addresses and `deviceId`
 * as the device. It has no `bytes`; `gather` and `scatter` reject with `KV_TRANSPORT_UNSUPPORTED`. Rejects with `KV_MEMORY_INVALID`; `close`
 * throws `KV_MEMORY_IN_USE` while it is registered.
 */
export async function openFileMemory(path: string, options: FileMemoryOptions): Promise<Memory & Disposable> {
  if (typeof path !== "string") {
    throw new KvError("KV_MEMORY_INVALID", `the path of a file is ${formatValue(path)}, not a string`);
  }
  requireObject(options, "KV_MEMORY_INVALID", "the description of a file");
  const { lengthBytes } = options;
  if (!Number.isSafeInteger(lengthBytes) || lengthBytes <= 0) {
    throw new KvError(
      "KV_MEMORY_INVALID",
      `lengthBytes is ${formatValue(lengthBytes)}, not a positive integer`,
    );
  }
  const failed = (action: string) => (cause: unknown) => {
    throw new KvError("KV_MEMORY_INVALID", `${path} could not be ${action}: ${String(cause)}`, { cause });
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
