import { open } from "node:fs/promises";
import { KvError, type Memory } from "@kv/interface";
import { requireObject, shown } from "../validate.js";
import { foreignMemory } from "./external-memory.js";

export interface FileMemoryOptions {
  /** Bytes of the file that transfers may touch, from its beginning. A shorter file is made as long. */
  readonly lengthBytes: number;
}

/**
 * Opens a file, or makes one, as memory that an agent with a storage backend (`POSIX`) can register. Between it and DRAM bytes
 * move by `transfer`: its list is `prepareRemote(agent.name, { memoryType: "FILE", rows })`, with places in the file as addresses and
 * `deviceId` as the device. It has no `bytes`, and `gather` and `scatter` are `KV_TRANSPORT_UNSUPPORTED`. Errors: `KV_MEMORY_INVALID`.
 */
export async function openFileMemory(path: string, options: FileMemoryOptions): Promise<Memory> {
  if (typeof path !== "string") {
    throw new KvError("KV_MEMORY_INVALID", `the path of a file is ${shown(path)}, not a string`);
  }
  requireObject(options, "KV_MEMORY_INVALID", "what is known of a file");
  const { lengthBytes } = options;
  if (!Number.isSafeInteger(lengthBytes) || lengthBytes <= 0) {
    throw new KvError("KV_MEMORY_INVALID", `lengthBytes is ${shown(lengthBytes)}, not a positive integer`);
  }
  const failed = (what: string) => (cause: unknown) => {
    throw new KvError("KV_MEMORY_INVALID", `${path} could not be ${what}: ${String(cause)}`, { cause });
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
    failed(`made ${lengthBytes} bytes long`)(error);
  }
  return foreignMemory({
    memoryType: "FILE",
    address: 0,
    lengthBytes,
    deviceId: handle.fd,
    subject: `the file ${path}`,
    check: false,
    onClose: () => void handle.close(),
  });
}
