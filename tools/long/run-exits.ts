import { spawn } from "node:child_process";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { ADDON_OF_BUNDLES, bundle } from "../../packages/nixl/test/support/bundle.js";
import { drawExit, type Exit, OUTPUT_BYTES } from "./exit.js";

export interface ExitsOptions {
  readonly seed: string;
  /** Which exits of that seed. */
  readonly numbers: readonly number[];
  /** Processes at a time. */
  readonly jobs: number;
  /**
   * Called after each process. `failure` is undefined for a correct end; otherwise it includes the
   * command that replays it.
   */
  readonly onEnd: (failure: string | undefined) => void;
}

const TIMEOUT_MS = 120_000;
const EXITING = fileURLToPath(new URL("./exiting.ts", import.meta.url));

/**
 * Runs processes that use NIXL and end at random places. Each must end with exit code 0 and its
 * whole output.
 */
export async function runExits({ seed, numbers, jobs, onEnd }: ExitsOptions): Promise<void> {
  const folder = await mkdtemp(join(tmpdir(), "kv-exits-"));
  const left = [...numbers];
  const runNext = async (file: string) => {
    for (let number = left.shift(); number !== undefined; number = left.shift()) {
      const exit = drawExit(seed, number);
      const failure = await failureOf(exit, file);
      onEnd(
        failure === undefined
          ? undefined
          : `exit ${number} ${JSON.stringify(exit)}: ${failure}\n` +
              `replay: node --import tsx tools/long/exits.ts --seed ${seed} --only ${number}`,
      );
    }
  };
  try {
    const file = await bundle(EXITING, folder);
    await Promise.all(Array.from({ length: jobs }, () => runNext(file)));
  } finally {
    await rm(folder, { recursive: true, force: true });
  }
}

/** Runs one process; undefined when it ends correctly. */
function failureOf(exit: Exit, file: string): Promise<string | undefined> {
  return new Promise((resolve, reject) => {
    const child = spawn(process.execPath, [file, JSON.stringify(exit)], {
      env: {
        ...process.env,
        ...ADDON_OF_BUNDLES,
        ...(exit.infiniband ? { UCX_MODULES: "^cuda" } : {}),
      },
      stdio: ["ignore", "pipe", "pipe"],
    });
    let writtenBytes = 0;
    let stderr = "";
    child.stdout.on("data", (chunk: Buffer) => {
      writtenBytes += chunk.length;
    });
    child.stderr.on("data", (chunk: Buffer) => {
      stderr += chunk.toString();
    });
    const timer = setTimeout(() => child.kill("SIGKILL"), TIMEOUT_MS);
    child.once("error", reject);
    child.once("close", (code, signal) => {
      clearTimeout(timer);
      if (code === 0 && writtenBytes === OUTPUT_BYTES) return resolve(undefined);
      const how = signal === null ? `exit code ${code}` : `signal ${signal}`;
      resolve(`${how}, ${writtenBytes} of ${OUTPUT_BYTES} bytes\n${stderr.slice(-2000)}`);
    });
  });
}
