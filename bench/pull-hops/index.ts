// How far a pull is above its bound at one request at a time, side by side with another checkout, and where the time goes between the processes.
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { openBandwidth } from "../push-vs-pull/bandwidth.js";
import { FORWARD_MS_PER_512, KV_BYTES_PER_TOKEN } from "../push-vs-pull/workload.js";
import { median, type Row, spread } from "../report.js";
import { openTree, type TreeDeployment } from "./tree.js";

const HERE = fileURLToPath(new URL("../..", import.meta.url));
const ROUNDS = Math.max(5, Number(process.env["KV_BENCH_ROUNDS"] ?? 40));
const LENGTHS = [128, 1024] as const;
const WANTED_MS = 10;

/** `only`: folders of other checkouts, with their dependencies and addon, to compare with; `trace` prints the medians of each hop. */
export async function pullHops(only: readonly string[] = []): Promise<readonly Row[]> {
  const others = only.filter((folder) => folder !== "trace");
  const rows = only.includes("trace") && others.length === 0 ? [] : await compare([HERE, ...others]);
  return [...rows, ...(only.includes("trace") ? await traceHops() : [])];
}

async function compare(folders: readonly string[]): Promise<readonly Row[]> {
  const bandwidth = await openBandwidth();
  const deployments: TreeDeployment[] = [];
  try {
    for (const folder of folders) deployments.push(await openTree(folder));
    const rows: Row[] = [];
    for (const inputTokens of LENGTHS) {
      const boundMs =
        (FORWARD_MS_PER_512 * inputTokens) / 512 +
        (await bandwidth.transferMs(inputTokens * KV_BYTES_PER_TOKEN, "contiguous"));
      const over: number[][] = folders.map(() => []);
      for (let round = 0; round < ROUNDS; round++) {
        // In turn, starting with another checkout in each round.
        for (let i = 0; i < folders.length; i++) {
          const index = (round + i) % folders.length;
          const ttftMs = await deployments[index]?.ttftMs(inputTokens, "compare");
          if (ttftMs !== undefined) over[index]?.push(ttftMs - boundMs);
        }
      }
      const [ours = [], ...theirs] = over;
      rows.push({
        what: `pull of ${inputTokens} tokens above its bound of ${boundMs.toFixed(1)} ms${theirs.length === 0 ? "" : `, and of ${folders.slice(1).join(", ")}`}`,
        ours: spread(ours, "ms"),
        theirs: theirs.map((values) => spread(values, "ms")).join("; ") || "-",
        ratio: theirs[0] === undefined ? undefined : median(ours) / median(theirs[0]),
        wanted: `<= ${WANTED_MS} ms`,
        met: median(ours) <= WANTED_MS,
      });
    }
    return rows;
  } finally {
    for (const deployment of deployments) await deployment.close();
    await bandwidth.close();
  }
}

interface Note {
  readonly atMs: number;
  readonly role: string;
  readonly event: string;
  readonly id: string;
}

/** One row per message: the time since the one before, the median of all requests. */
async function traceHops(): Promise<readonly Row[]> {
  const folder = mkdtempSync(join(tmpdir(), "kv-hops-"));
  const file = join(folder, "trace");
  try {
    const deployment = await openTree(HERE, file);
    const sent: number[] = [];
    const first: number[] = [];
    try {
      for (let round = 0; round < ROUNDS; round++) {
        sent.push(Number(process.hrtime.bigint()) / 1e6);
        first.push((sent.at(-1) ?? 0) + (await deployment.ttftMs(128, `hops-${round}`)));
      }
    } finally {
      // The processes write their notes twice a second.
      await new Promise((resolve) => setTimeout(resolve, 1500));
      await deployment.close();
    }
    const notes = readFileSync(file, "utf8")
      .trim()
      .split("\n")
      .map((line) => JSON.parse(line) as Note);
    const steps = new Map<string, number[]>();
    for (let round = 0; round < ROUNDS; round++) {
      const ofRound = notes.filter(({ id }) => id.includes(`hops-${round}-`)).sort((a, b) => a.atMs - b.atMs);
      let beforeMs = sent[round] ?? 0;
      const seen = new Map<string, number>();
      for (const { atMs, role, event } of [
        ...ofRound,
        { atMs: first[round] ?? 0, role: "client", event: "first token" },
      ]) {
        const name = `${role}: ${event.replace(/ http:.*/, "")}`;
        seen.set(name, (seen.get(name) ?? 0) + 1);
        const key = `${name}${(seen.get(name) ?? 0) > 1 ? " again" : ""}`;
        steps.set(key, [...(steps.get(key) ?? []), atMs - beforeMs]);
        beforeMs = atMs;
      }
    }
    return Array.from(
      steps,
      ([what, times]): Row => ({
        what,
        ours: spread(times, "ms"),
        theirs: "-",
        ratio: undefined,
        wanted: "reported",
        met: undefined,
      }),
    );
  } finally {
    rmSync(folder, { recursive: true });
  }
}
