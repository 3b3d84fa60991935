import { open } from "node:fs/promises";
import { join } from "node:path";
import { type BackendSpec, KvError, type KvErrorCode } from "@kv/interface";
import { pluginFolder } from "../backends/plugins.js";
import type { Environment } from "../environment.js";
import { reinstallHint } from "./library-package.js";

const HEADER_BYTES = 64;
/** "\x7fELF", 64 bits, little endian: x64 and arm64. */
const MAGIC = Uint8Array.of(0x7f, 0x45, 0x4c, 0x46, 2, 1);
const ENTRY_BYTES = 56;
/** `PT_LOAD`. */
const LOADED = 1;

/**
 * Loading a truncated file, such as after a full disk, would end the process. Rejects with
 * `KV_LIBRARY_INCOMPATIBLE` for the library, `KV_BACKEND_UNAVAILABLE` for a plugin. Missing and
 * other files pass: the loader reports those.
 */
export async function requireComplete(
  libraryPath: string,
  backends: readonly BackendSpec[],
  environment: Environment,
): Promise<void> {
  const hint = reinstallHint(libraryPath, environment);
  await requireFile(libraryPath, "NIXL's library", "KV_LIBRARY_INCOMPATIBLE", hint);
  for (const { name } of backends) {
    const plugin = join(pluginFolder(libraryPath, environment), `libplugin_${name}.so`);
    await requireFile(plugin, `the plugin of backend ${name}`, "KV_BACKEND_UNAVAILABLE", hint);
  }
}

async function requireFile(
  path: string,
  what: string,
  code: KvErrorCode,
  hint: string,
): Promise<void> {
  const truncation = await truncationOf(path).catch(() => undefined);
  if (truncation === undefined) return;
  const { wanted, found } = truncation;
  const message = `${what} is truncated: ${path} has ${found} bytes and needs at least ${wanted}`;
  throw new KvError(code, message, { hint, details: { path, ...truncation } });
}

/** In bytes. */
export interface Truncation {
  /** The length that its program headers ask for. */
  readonly wanted: number;
  readonly found: number;
}

/**
 * Compares a shared library with its ELF program headers: the loader maps a truncated file, and the
 * process dies of SIGBUS beyond its end. Undefined for files that are complete or that the loader
 * refuses. Rejects when the file cannot be read.
 */
export async function truncationOf(path: string): Promise<Truncation | undefined> {
  const file = await open(path);
  try {
    const found = (await file.stat()).size;
    const header = await read(HEADER_BYTES, 0);
    if (header === undefined || !MAGIC.every((byte, index) => header[index] === byte))
      return undefined;
    const [at, size, count] = [
      header.readBigUInt64LE(32),
      header.readUInt16LE(54),
      header.readUInt16LE(56),
    ];
    if (size !== ENTRY_BYTES || at > found) return undefined;
    const table = await read(ENTRY_BYTES * count, Number(at));
    if (table === undefined) return undefined;
    let wanted = 0;
    for (let entry = 0; entry < table.length; entry += ENTRY_BYTES) {
      if (table.readUInt32LE(entry) !== LOADED) continue;
      const end = table.readBigUInt64LE(entry + 8) + table.readBigUInt64LE(entry + 32);
      wanted = Math.max(wanted, Number(end));
    }
    return wanted > found ? { wanted, found } : undefined;
  } finally {
    await file.close();
  }

  /** Undefined when the file ends earlier. */
  async function read(lengthBytes: number, position: number): Promise<Buffer | undefined> {
    const buffer = Buffer.alloc(lengthBytes);
    const { bytesRead } = await file.read(buffer, 0, lengthBytes, position);
    return bytesRead === lengthBytes ? buffer : undefined;
  }
}
