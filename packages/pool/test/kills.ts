import { spawn } from "node:child_process";
import { once } from "node:events";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { bundled } from "@kv/testing/node-programs";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { expect, onTestFinished } from "vitest";

const CHILD = fileURLToPath(new URL("children/put-blocks.ts", import.meta.url));
/**
 * One life of a pool: what it found, and what it had acknowledged and not evicted at its end. A
 * kill in the middle of `put` may hide one eviction.
 */
async function life(path: string, seed: number, livesMs: number) {
  const child = spawn(process.execPath, [await bundled(CHILD), path, String(seed)], {
    stdio: ["ignore", "pipe", "inherit"],
  });
  const exited = once(child, "exit");
  const found = new Set<string>();
  const kept = new Set<string>();
  let bad = "";
  let mayHide = 0;
  for await (const line of createInterface({ input: child.stdout })) {
    const [what = "", name = ""] = line.split(" ");
    if (what === "found") found.add(name);
    if (what === "found" || what === "kept") kept.add(name);
    else if (what === "torn" || (what === "damaged" && name !== "0")) bad = line;
    else if (what === "ready") setTimeout(() => child.kill("SIGKILL"), livesMs);
    else if (what === "gone") kept.delete(name);
    if (what === "put") mayHide = 1;
    else if (what === "began") mayHide = 0;
  }
  const [, signal] = (await exited) as [number | null, NodeJS.Signals | null];
  expect({ signal, bad }).toEqual({ signal: "SIGKILL", bad: "" });
  return { found, kept, mayHide };
}

/**
 * Kills a pool with a file, or with an object store, so many times at any moment. Each next one must have what was acknowledged, and
 * nothing that is torn.
 */
export async function killPools(kills: number, objectStore?: string): Promise<void> {
  const folder = scratchFolder(onTestFinished);
  let before = { kept: new Set<string>(), mayHide: 0 };
  let checked = 0;
  for (let kill = 0; kill <= kills; kill += 1) {
    const path = objectStore ?? join(folder, "blocks");
    const { found, ...after } = await life(path, kill, (kill * 37) % 211);
    const lost = [...before.kept].filter((name) => !found.has(name));
    expect(lost.slice(before.mayHide), `kill ${kill}`).toEqual([]);
    checked += before.kept.size;
    before = after;
  }
  expect(checked).toBeGreaterThan(kills);
}
