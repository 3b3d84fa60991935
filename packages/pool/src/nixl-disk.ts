import { once } from "node:events";
import { readSync } from "node:fs";
import { type FileHandle, mkdir, open } from "node:fs/promises";
import { createServer, type Server } from "node:net";
import { dirname } from "node:path";
import { type Agent, KvError, type Memory, type PreparedList, type Transport } from "@kv/interface";
import { openFileMemory } from "@kv/nixl";
import { type Disk, HEADER_BYTES } from "./block-file.js";

/** Options of `openNixlDisk`. */
export interface NixlDiskOptions {
  /** It must have NIXL's backend POSIX. The caller closes it. */
  readonly transport: Transport;
  /** Blocks are written from its slots and read into them. */
  readonly memory: Memory;
  /** Of the file, which is made if missing. */
  readonly path: string;
  /** The file is not longer. */
  readonly limitBytes: number;
  readonly blockLengthBytes: number;
}

/** A place is a page with the header, then the block. */
const PAGE_BYTES = 4096;
const MAX_PLACES = 2 ** 31 - 1;

/**
 * Opens a file of blocks for NIXL's backend POSIX.
 * @throws `KV_CONFIG_INVALID` when another process has it, or the limit has no block;
 * `KV_MEMORY_INVALID`, `KV_BACKEND_UNAVAILABLE`.
 */
export async function openNixlDisk(options: NixlDiskOptions): Promise<Disk> {
  const { transport, memory, path, limitBytes, blockLengthBytes: length } = options;
  const strideBytes = PAGE_BYTES + Math.ceil(length / PAGE_BYTES) * PAGE_BYTES;
  const places = Math.min(Math.floor(limitBytes / strideBytes), MAX_PLACES);
  if (places < 1)
    throw new KvError(
      "KV_CONFIG_INVALID",
      `a file of ${limitBytes} bytes has no block of ${length} bytes`,
      { hint: `a block takes ${strideBytes} bytes of the file` },
    );

  await mkdir(dirname(path), { recursive: true });
  const file = await openFileMemory(path, { lengthBytes: places * strideBytes });
  const closers: (() => unknown)[] = [() => file.close()];
  const close = async () => {
    for (const each of closers.splice(0).reverse()) await each();
  };
  try {
    const handle = await open(path, "r+");
    closers.push(() => handle.close());
    const lock = await lockFile(handle, path);
    closers.push(() => lock.close());
    await handle.sync();
    // The name, too, must outlive a loss of power.
    const folder = await open(dirname(path));
    await folder.sync().finally(() => folder.close());

    const agent = await transport.createAgent({ backends: [{ name: "POSIX" }] });
    closers.push(() => agent.close());
    await agent.register(memory);
    await agent.register(file);
    const slots = await slotsOf(agent, memory, length);
    const blocks = await agent.prepareRemote(agent.name, {
      memoryType: "FILE",
      rows: Float64Array.of(PAGE_BYTES, length, file.deviceId, strideBytes, places),
    });
    return {
      ...movedBlocks(agent, slots, blocks),
      header(place) {
        const bytes = Buffer.alloc(HEADER_BYTES);
        readSync(handle.fd, bytes, 0, HEADER_BYTES, place * strideBytes);
        return bytes;
      },
      async writeHeader(place, bytes) {
        await handle.write(bytes, 0, HEADER_BYTES, place * strideBytes);
      },
      sync: () => handle.datasync(),
      close,
    };
  } catch (error) {
    await close();
    throw error;
  }
}

/** A name that Linux frees with the process, however it ends. */
async function lockFile(handle: FileHandle, path: string): Promise<Server> {
  const { dev, ino } = await handle.stat();
  const lock = createServer((socket) => socket.destroy());
  lock.listen(`\0kv-pool ${dev} ${ino}`);
  try {
    await once(lock, "listening");
  } catch (cause) {
    throw new KvError("KV_CONFIG_INVALID", `${path} is used by another process`, {
      hint: "give each kv-pool a folder of its own",
      cause,
    });
  }
  return lock.unref();
}

/** The memory as slots of a length. */
export function slotsOf(agent: Agent, memory: Memory, lengthBytes: number): Promise<PreparedList> {
  const { memoryType, address, deviceId } = memory;
  const count = Math.floor(memory.lengthBytes / lengthBytes);
  const rows = Float64Array.of(address, lengthBytes, deviceId, lengthBytes, count);
  return agent.prepareLocal({ memoryType, rows });
}

/** The part of a disk that moves blocks between slots of memory and its places. */
export function movedBlocks(
  agent: Agent,
  slots: PreparedList,
  blocks: PreparedList,
): Pick<Disk, "places" | "write" | "read"> {
  return {
    places: blocks.count,
    write: (place, slot) => move(agent, "WRITE", [slots, [slot]], [blocks, [place]]),
    read: (places, ids) => move(agent, "READ", [slots, ids], [blocks, places]),
  };
}

type Blocks = readonly [list: PreparedList, ids: readonly number[]];

/** Resolves when NIXL uses the memory no more. */
export async function move(
  agent: Agent,
  operation: "READ" | "WRITE",
  [local, localIds]: Blocks,
  [remote, remoteIds]: Blocks,
): Promise<void> {
  const { done, released } = agent.transfer({
    operation,
    local,
    localIds: Int32Array.from(localIds),
    remote,
    remoteIds: Int32Array.from(remoteIds),
  });
  try {
    await done;
  } finally {
    await released;
  }
}
