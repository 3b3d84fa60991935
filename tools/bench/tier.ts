import { spawn } from "node:child_process";
import { mkdtemp, open, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface, type Interface } from "node:readline";
import { nixlTransport } from "@kv/nixl";
import { BlockFile, BlockPool, openNixlDisk } from "@kv/pool";
import { openTier } from "@kv/tier";
import { compare, type Row } from "./report.js";
import type { Run } from "./run.js";

/** Blocks of 16 tokens of Qwen3-0.6B and of Llama-3.1-8B, in 16-bit floats, with what else a tier has. */
const BLOCKS = [549 * 1024, 2.5 * 2 ** 20];
const TOTAL_BYTES = 256 * 2 ** 20;
const ROUNDS = 15;
const NAMESPACE = { fingerprint: "bench", hashSeed: "bench" };

/** A member of the tier in another process, whose blocks have their numbers as keys. */
const HOLDER = `
  import { nixlTransport } from "@kv/nixl";
  import { openTier } from "@kv/tier";
  const [blockLengthBytes, count] = process.argv.slice(1).map(Number);
  const transport = nixlTransport();
  const memory = transport.allocate(blockLengthBytes * count);
  memory.bytes.fill(7);
  const store = { pin: async (keys) => keys.map((key) => Number(Buffer.from(key))), unpin() {} };
  const tier = await openTier({
    transport, memory, store, blockLengthBytes, host: "127.0.0.1", port: 0,
    ...${JSON.stringify(NAMESPACE)},
  });
  console.log(tier.localId + " " + memory.address);
  process.stdin.resume().on("end", () => process.exit());`;

/** Reads a region block by block with one process_vm_readv each, and prints the seconds. */
const READER = `
import ctypes, mmap, os, sys, time
pid, address, length, count = (int(word) for word in sys.argv[1:])
class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
call = ctypes.CDLL(None, use_errno=True).process_vm_readv
call.restype = ctypes.c_ssize_t
memory = mmap.mmap(-1, length * count)
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
for _ in sys.stdin:
    began = time.perf_counter()
    for at in range(count):
        local, remote = Iovec(base + at * length, length), Iovec(address + at * length, length)
        if call(pid, ctypes.byref(local), ctypes.c_ulong(1), ctypes.byref(remote), ctypes.c_ulong(1), ctypes.c_ulong(0)) != length:
            raise OSError(ctypes.get_errno(), "process_vm_readv")
    print(time.perf_counter() - began, flush=True)`;

const mb = (bytes: number): string => `${(bytes / 1e6).toFixed(1)} MB`;

async function nextLine(lines: Interface): Promise<string> {
  return new Promise((resolve) => lines.once("line", resolve));
}

/** Blocks that another process holds: by the tier, and by process_vm_readv. */
async function memory(run: Run): Promise<Row[]> {
  const rows: Row[] = [];
  for (const blockLengthBytes of BLOCKS) {
    const count = Math.floor(TOTAL_BYTES / blockLengthBytes);
    const args = ["--input-type=module", "-e", HOLDER, String(blockLengthBytes), String(count)];
    const holder = spawn(process.execPath, args, {
      cwd: import.meta.dirname,
      stdio: ["pipe", "pipe", "inherit"],
    });
    const [peerId = "", address = ""] = (
      await nextLine(createInterface({ input: holder.stdout }))
    ).split(" ");
    const reader = spawn(
      "python3",
      ["-c", READER, ...[holder.pid, address, blockLengthBytes, count].map(String)],
      { stdio: ["pipe", "pipe", "inherit"] },
    );
    const lines = createInterface({ input: reader.stdout });

    const transport = nixlTransport();
    const own = transport.allocate(blockLengthBytes);
    const store = {
      pin: async (keys: readonly unknown[]) => keys.map(() => undefined),
      unpin() {},
    };
    const tier = await openTier({
      transport,
      memory: own,
      store,
      blockLengthBytes,
      host: "127.0.0.1",
      port: 0,
      landingBlocks: count,
      ...NAMESPACE,
    });
    const keys = Array.from({ length: count }, (_, at) => Buffer.from(String(at).padStart(5)));
    const bytes = count * blockLengthBytes;
    const { rate } = await inTurns(run.rounds(ROUNDS), 2, async (side) => {
      if (side === 1) {
        reader.stdin.write("\n");
        return { rate: bytes / Number(await nextLine(lines)) / 1e9 };
      }
      const beganMs = performance.now();
      await tier.read(peerId, keys, () => {});
      return { rate: bytes / (performance.now() - beganMs) / 1e6 };
    });
    const what = `read ${count} blocks of ${mb(blockLengthBytes)}: the tier / process_vm_readv`;
    rows.push(compare(what, rate, "GB/s", ">="));

    await tier.close();
    own.close();
    await transport.close();
    reader.stdin.end();
    holder.stdin.end();
  }
  return rows;
}

/** Blocks that a crash leaves: by a pool, and as one long file with one sync. */
async function files(run: Run): Promise<Row[]> {
  const rows: Row[] = [];
  for (const blockLengthBytes of BLOCKS) {
    const count = Math.floor(TOTAL_BYTES / blockLengthBytes);
    const folder = await mkdtemp(join(tmpdir(), "kv-bench-tier-"));
    const transport = nixlTransport();
    const memory = transport.allocate(count * blockLengthBytes);
    const block = new Uint8Array(blockLengthBytes).fill(7);
    const bytes = count * blockLengthBytes;
    const rate = (beganMs: number) => bytes / (performance.now() - beganMs) / 1e6;
    const plain = await open(join(folder, "plain"), "w");
    const all = new Uint8Array(bytes).fill(7);
    try {
      const { write } = await inTurns(run.rounds(ROUNDS), 1, async (side, round) => {
        if (side === 1) {
          const beganMs = performance.now();
          await plain.write(all, 0, bytes, 0);
          await plain.datasync();
          return { write: rate(beganMs) };
        }
        const path = join(folder, "blocks");
        const limitBytes = 2 * bytes;
        const disk = await openNixlDisk({ transport, memory, path, limitBytes, blockLengthBytes });
        const file = new BlockFile(disk, { blockLengthBytes, ...NAMESPACE });
        const pool = new BlockPool({ memory, blockLengthBytes, file });
        const keys = Array.from({ length: count }, (_, at) => Buffer.from(`${round} ${at}`));
        const beganMs = performance.now();
        const kept = await Promise.all(keys.map((key) => pool.put(key, undefined, block)));
        const measured = { write: rate(beganMs) };
        if (kept.includes(false)) throw new Error("the pool kept not all blocks");
        await pool.close();
        return measured;
      });
      const what = `keep ${count} blocks of ${mb(blockLengthBytes)} on disk: the pool / one write and one sync`;
      rows.push(compare(what, write, "GB/s", ">="));
    } finally {
      await plain.close();
      await transport.close();
      memory.close();
      await rm(folder, { recursive: true });
    }
  }
  return rows;
}

/** Memory of another process, and files, through `@kv/tier` and `@kv/pool`. */
export function tier(run: Run): Promise<Row[]> {
  return run.parts({ memory, files }, run);
}

/** Figures of the pool and of the reference, by name: each goes first in every other round. */
async function inTurns<Figure extends string>(
  rounds: number,
  unseen: number,
  measure: (side: 0 | 1, round: number) => Promise<Readonly<Record<Figure, number>>>,
): Promise<Record<Figure, [number[], number[]]>> {
  const all: Partial<Record<Figure, [number[], number[]]>> = {};
  for (let round = 0; round < rounds + unseen; round += 1)
    for (const side of round % 2 === 0 ? ([0, 1] as const) : ([1, 0] as const)) {
      const figures = Object.entries(await measure(side, round)) as [Figure, number][];
      if (round < unseen) continue;
      for (const [name, figure] of figures) {
        all[name] ??= [[], []];
        all[name][side].push(figure);
      }
    }
  return all as Record<Figure, [number[], number[]]>;
}
