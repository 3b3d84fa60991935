import { open } from "node:fs/promises";
import { KvError, type Memory } from "@kv/interface";

export interface FileMemoryOptions {
  /** Bytes of the file that transfers may touch, from its beginning. A shorter file is made as long. */
  readonly lengthBytes: number;
}

interface OpenFile {
  /** Somebody has registered it; the answered function says that it is over. */
  hold(): () => void;
}

const files = new WeakMap<Memory, OpenFile>();

/** What was opened here; undefined for memory of another kind. */
export const fileOf = (memory: Memory): OpenFile | undefined => files.get(memory);

/**
 * Opens a file, or makes one, as memory that an agent with a storage backend (`POSIX`) can register. Between it and DRAM bytes
 * move by `transfer`: its list is `prepareRemote(agent.name, { memoryType: "FILE", rows })`, with places in the file as addresses and
 * `deviceId` as the device. It has no `bytes`, and `gather` and `scatter` are `KV_TRANSPORT_UNSUPPORTED`. Errors: `KV_MEMORY_INVALID`.
 */
export async function openFileMemory(path: string, { lengthBytes }: FileMemoryOptions): Promise<Memory> {
  if (!Number.isSafeInteger(lengthBytes) || lengthBytes <= 0) {
    throw new KvError("KV_MEMORY_INVALID", `lengthBytes is ${lengthBytes}, not a positive integer`);
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
  let holders = 0;
  let closed = false;
  const unsupported = async (): Promise<never> => {
    throw new KvError("KV_TRANSPORT_UNSUPPORTED", `${path} is a file, whose bytes only transfers move`);
  };
  const memory: Memory = Object.freeze({
    address: 0,
    lengthBytes,
    memoryType: "FILE",
    deviceId: handle.fd,
    bytes: new Uint8Array(0),
    gather: unsupported,
    scatter: unsupported,
    close() {
      if (closed) return;
      if (holders > 0) {
        throw new KvError("KV_MEMORY_IN_USE", `${holders} registrations name ${path}`, {
          hint: "close them before the memory",
        });
      }
      closed = true;
      void handle.close();
    },
  });
  files.set(memory, {
    hold() {
      if (closed) throw new KvError("KV_MEMORY_INVALID", `${path} is closed`);
      holders++;
      let over = false;
      return () => {
        if (over) return;
        over = true;
        holders--;
      };
    },
  });
  return memory;
}
