// How far a pull is above its bound at one request at a time, side by side with another checkout, and where the time goes between the processes.
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { readSpans, type TraceSpan } from "@kv/protocol";
import { openBandwidth } from "../push-vs-pull/processes/bandwidth.js";
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

const linesOf = (file: string) => readFileSync(file, "utf8").trim().split("\n");

/** The start and the end of each span, with the request's id, which one span of each trace has. */
function notesOfSpans(spans: readonly TraceSpan[]): Note[] {
  const ids = new Map<string, string>();
  for (const { traceId, attributes } of spans) {
    const id = attributes["kv.request_id"];
    if (typeof id === "string") ids.set(traceId, id);
  }
  return spans.flatMap(({ traceId, process, name, startMs, endMs }) => {
    const about = { role: process.replace(/^kv-\S+ /, ""), id: ids.get(traceId) ?? "" };
    return [
      { ...about, event: `${name} begins`, atMs: startMs },
      { ...about, event: `${name} ends`, atMs: endMs },
    ];
  });
}

interface Note {
  readonly atMs: number;
  readonly role: string;
  readonly event: string;
  readonly id: string;
}

/** One row per message and per start or end of a span: the time since the one before, and when it was, the medians of all requests. */
async function traceHops(): Promise<readonly Row[]> {
  const folder = mkdtempSync(join(tmpdir(), "kv-hops-"));
  const file = join(folder, "trace");
  try {
    const notes: Note[] = [];
    const deployment = await openTree(HERE, file);
    try {
      for (let round = 0; round < ROUNDS; round++) {
        for (const inputTokens of LENGTHS) {
          const id = `hops-${inputTokens}-${round}-`;
          const sentAtMs = performance.timeOrigin + performance.now();
          const firstAtMs = sentAtMs + (await deployment.ttftMs(inputTokens, id));
          notes.push({ atMs: sentAtMs, role: "client", event: "request sent", id });
          notes.push({ atMs: firstAtMs, role: "client", event: "first token", id });
        }
      }
    } finally {
      // The processes write their notes twice a second.
      await new Promise((resolve) => setTimeout(resolve, 1500));
      await deployment.close();
    }
    notes.push(...linesOf(file).map((line) => JSON.parse(line) as Note));
    notes.push(...notesOfSpans(linesOf(`${file}.spans`).flatMap(readSpans)));
    return LENGTHS.flatMap((inputTokens) => hopsOf(notes, inputTokens));
  } finally {
    rmSync(folder, { recursive: true });
  }
}

function hopsOf(notes: readonly Note[], inputTokens: number): Row[] {
  const steps = new Map<string, { sinceMs: number[]; atMs: number[] }>();
  for (let round = 0; round < ROUNDS; round++) {
    const ofRound = notes
      .filter(({ id }) => id.includes(`hops-${inputTokens}-${round}-`))
      .sort((a, b) => a.atMs - b.atMs);
    const firstMs = ofRound[0]?.atMs ?? 0;
    let beforeMs = firstMs;
    const seen = new Map<string, number>();
    for (const { atMs, role, event } of ofRound) {
      const name = `${role}: ${event.replace(/ http:.*/, "")}`;
      seen.set(name, (seen.get(name) ?? 0) + 1);
      const key = `${name}${(seen.get(name) ?? 0) > 1 ? " again" : ""}`;
      const step = steps.get(key) ?? { sinceMs: [], atMs: [] };
      steps.set(key, step);
      step.sinceMs.push(atMs - beforeMs);
      step.atMs.push(atMs - firstMs);
      beforeMs = atMs;
    }
  }
  return Array.from(steps)
    .sort(([, a], [, b]) => median(a.atMs) - median(b.atMs))
    .map(
      ([what, { sinceMs, atMs }]): Row => ({
        what: `${inputTokens} tokens, at ${median(atMs).toFixed(2)} ms: ${what}`,
        ours: spread(sinceMs, "ms"),
        theirs: "-",
        ratio: undefined,
        wanted: "reported",
        met: undefined,
      }),
    );
}
