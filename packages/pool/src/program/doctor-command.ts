import { mkdtemp, rm, statfs } from "node:fs/promises";
import { freemem } from "node:os";
import { join } from "node:path";
import { KvError, silentLog } from "@kv/interface";
import { describePlugins, findLibrary, nixlTransport } from "@kv/nixl";
import { checksText, printDoctorReport, reportOfChecks } from "@kv/program";
import type { Command } from "commander";
import { BlockFile } from "../block-file.js";
import { BlockPool } from "../block-pool.js";
import { openNixlDisk } from "../nixl-disk.js";
import { addPoolCommand, type NamespaceOptions, namespaceOf } from "./namespace-options.js";

interface DoctorOptions extends NamespaceOptions {
  readonly memory: number;
  readonly files?: string;
  readonly json?: true;
}

interface Finding {
  readonly status: "ok" | "note" | "warn" | "fail";
  readonly found: string;
  readonly fix?: string | undefined;
}

interface Check extends Finding {
  readonly id: string;
  readonly area: string;
  readonly title: string;
}

const PROBE_BYTES = 2 ** 20;
const PROBE_BLOCKS = 32;

export function addDoctor(program: Command): void {
  addPoolCommand(program, "doctor").action(async (options: DoctorOptions) => {
    printDoctorReport(reportOfChecks(await checks(options)), {
      json: options.json,
      text: (report) =>
        checksText(report, {
          ok: "a pool can run here",
          warn: "a pool can run here, with less than was asked for",
          fail: "a pool cannot run here so",
        }),
    });
  });
}

async function checks(options: DoctorOptions): Promise<Check[]> {
  const { memory, files, like } = options;
  const check = async (id: string, title: string, find: () => Promise<Finding>) => {
    const [area = ""] = id.split(".");
    const finding = await find().catch((thrown: unknown): Finding => {
      const error = KvError.from(thrown, "KV_INTERNAL", title);
      return { status: "fail", found: `${error.message} [${error.code}]`, fix: error.hint };
    });
    return { id, area, title, ...finding };
  };
  return [
    await check("nixl.plugins", "NIXL", () => plugins(files !== undefined)),
    await check("memory.free", "memory", async () => {
      const found = `${gib(memory)} for blocks, ${gib(freemem())} free`;
      return { status: memory < freemem() ? "ok" : "warn", found };
    }),
    ...(files === undefined ? [] : [await check("files.speed", "files", () => fileSpeed(files))]),
    ...(like === undefined
      ? []
      : [
          await check("vllm.tier", "P2P tier", async () => {
            const asked = await namespaceOf(options, silentLog);
            const { blockLengthBytes, fingerprint, hashSeed } = asked;
            const values = `--block-length ${blockLengthBytes} --fingerprint ${fingerprint} --hash-seed ${hashSeed}`;
            return { status: "ok", found: `${like}: ${values}` };
          }),
        ]),
  ];
}

async function plugins(needsFiles: boolean): Promise<Finding> {
  const libraryPath = await findLibrary();
  const names = needsFiles ? ["UCX", "POSIX"] : ["UCX"];
  const described = await describePlugins({ libraryPath, names });
  const loaded = described.filter(({ loads }) => loads).map(({ name }) => name);
  const lacking = names.filter((name) => !loaded.includes(name));
  const found = `${libraryPath} with ${loaded.join(" and ") || "no backend that loads"}`;
  if (lacking.length === 0) return { status: "ok", found };
  const fix = "kv-nixl doctor says why a backend does not load";
  return { status: "fail", found: `${found}, without ${lacking.join(" and ")}`, fix };
}

/** Writes blocks as a pool does, and reads them back. */
async function fileSpeed(files: string): Promise<Finding> {
  const folder = await mkdtemp(join(files, "kv-pool-doctor-"));
  const transport = nixlTransport();
  const memory = transport.allocate(PROBE_BLOCKS * PROBE_BYTES);
  try {
    const path = join(folder, "probe");
    const limitBytes = 2 * PROBE_BLOCKS * PROBE_BYTES;
    const blockLengthBytes = PROBE_BYTES;
    const disk = await openNixlDisk({ transport, memory, path, limitBytes, blockLengthBytes });
    const file = new BlockFile(disk, { blockLengthBytes, fingerprint: "", hashSeed: "" });
    const pool = new BlockPool({ memory, blockLengthBytes, file });
    const bytes = new Uint8Array(PROBE_BYTES).fill(7);
    const keys = Array.from({ length: PROBE_BLOCKS }, (_, at) => Buffer.from(`block ${at}`));
    const beganMs = performance.now();
    const kept = await Promise.all(keys.map((key) => pool.put(key, undefined, bytes)));
    const ms = performance.now() - beganMs;
    await pool.close();
    if (kept.includes(false)) return { status: "fail", found: `${files} took not all blocks` };
    const { bavail, bsize } = await statfs(files);
    const rate = (PROBE_BLOCKS * PROBE_BYTES) / ms / 1000;
    return {
      status: "ok",
      found: `${rate.toFixed(0)} MB/s kept across a loss of power, ${gib(bavail * bsize)} free`,
    };
  } finally {
    await transport.close();
    memory.close();
    await rm(folder, { recursive: true });
  }
}

const gib = (bytes: number): string => `${(bytes / 2 ** 30).toFixed(1)} GiB`;
