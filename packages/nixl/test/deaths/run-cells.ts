import { spawn } from "node:child_process";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { bundled } from "@kv/testing/node-programs";
import { type Cell, isByPeer, nameOf, ROUTES } from "./cells.js";

/** What one run of one cell has shown. */
export interface CellResult {
  readonly cell: string;
  /** None when all went as it must. */
  readonly problems: readonly string[];
}

/**
 * The libraries log the end of a peer that acts, but not each answer that did not reach it. UCX
 * does so for each small WRITE that had arrived: 600 at most.
 */
const MAX_LINES = 50;

const fileOf = (name: string) => bundled(fileURLToPath(new URL(name, import.meta.url)));

/**
 * Runs the cells, those of one route in one process. `onResult` hears of each when it has ended. A
 * cell whose process died has that as its problem.
 */
export async function runCells(
  cells: readonly Cell[],
  onResult: (result: CellResult) => void,
): Promise<void> {
  const [observer, peerFile] = [await fileOf("./observer.ts"), await fileOf("./dying-peer.ts")];
  const runRoute = async (own: readonly Cell[]) => {
    const names: string[] = [];
    const { code, stderr } = await observe(
      observer,
      { cells: own, peerFile },
      ({ cell, problems }, lines) => {
        names.push(cell);
        const isFlood =
          lines > MAX_LINES &&
          own.some(
            (one) => isByPeer(one) && one.phase !== "small-write-by" && nameOf(one) === cell,
          );
        const flood = isFlood ? [`the libraries wrote ${lines} lines to stderr`] : [];
        onResult({ cell, problems: [...problems, ...flood] });
      },
    );
    const died = own[names.length];
    if (died === undefined) return;
    onResult({
      cell: nameOf(died),
      problems: [`the process ended with ${code}: ${stderr.slice(-500)}`],
    });
    await runRoute(own.slice(names.length + 1));
  };
  const groups = (isCable: boolean) =>
    ROUTES.map((route) =>
      cells.filter((cell) => cell.route === route && (cell.ending === "cable") === isCable),
    );
  await Promise.all(groups(false).map(runRoute));
  // One after another, and after the rest: agents use network devices that come and go with the
  // cables.
  for (const group of groups(true)) await runRoute(group);
}

function observe(
  file: string,
  options: { readonly cells: readonly Cell[]; readonly peerFile: string },
  onResult: (result: CellResult, lines: number) => void,
): Promise<{ code: number | string | null; stderr: string }> {
  return new Promise((resolve) => {
    const child = spawn(process.execPath, [file, JSON.stringify(options)], {
      stdio: ["ignore", "pipe", "pipe"],
    });
    let [stderr, written] = ["", 0];
    createInterface({ input: child.stdout }).on("line", (line) => {
      onResult(JSON.parse(line) as CellResult, written);
      written = 0;
    });
    child.stderr.on("data", (chunk: Buffer) => {
      stderr = (stderr + chunk.toString()).slice(-4000);
      written += chunk.toString().split("\n").length - 1;
    });
    child.once("close", (code, signal) => resolve({ code: signal ?? code, stderr }));
  });
}
