import { createHash } from "node:crypto";
import {
  ftruncateSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  rmSync,
  writeFileSync,
  writeSync,
} from "node:fs";
import { Session } from "node:inspector/promises";
import { join } from "node:path";
import { KvError } from "@kv/interface";
import { seededRandom } from "@kv/transport-memory";
import type { PartOptions } from "../main.js";
import { type Row, rowOf } from "../row.js";
import { mutate } from "./mutate.js";
import type { FuzzTarget } from "./target.js";
import { TARGETS } from "./targets/index.js";

/** Processor time, far more than any input of some KB needs. */
const LIMIT_MS = 1000;
const BATCH = 100;
const MOST_FAILURES = 20;
const MOST_KEPT = 30;

export const CORPUS = join(import.meta.dirname, "./corpus/");

export function readInputs(folder: string): Uint8Array[] {
  mkdirSync(folder, { recursive: true });
  return readdirSync(folder)
    .sort()
    .map((file) => readFileSync(`${folder}/${file}`));
}

function keep(folder: string, kind: "failed" | "covers", input: Uint8Array): string {
  const digest = createHash("sha256").update(input).digest("hex").slice(0, 12);
  const path = `${folder}/${kind}-${digest}.bin`;
  writeFileSync(path, input);
  return path;
}

/**
 * What is wrong; undefined where the target returned, or refused the input with a `KvError`, in
 * time.
 */
export function checkInput(target: FuzzTarget, input: Uint8Array): string | undefined {
  const begun = process.cpuUsage();
  try {
    target.read(input);
  } catch (error) {
    if (!KvError.is(error))
      return error instanceof Error ? (error.stack ?? error.message) : String(error);
    if (error.message.length > 20_000)
      return `the error's message has ${error.message.length} characters`;
  }
  const { user, system } = process.cpuUsage(begun);
  const tookMs = (user + system) / 1000;
  return tookMs > LIMIT_MS ? `took ${Math.round(tookMs)} ms for ${input.length} bytes` : undefined;
}

/**
 * A failing input is saved in the corpus. `reading.bin` there is the current one: it stays where
 * the reader never returns, or ends the process.
 */
export async function runFuzz(name: string, options: PartOptions): Promise<Row> {
  const target = TARGETS[name] as FuzzTarget;
  const untilMs = Date.now() + options.minutes * 60_000;
  const random = seededRandom(options.seed);
  const [folder, found] = [`${CORPUS}${name}`, `${options.found}/${name}`];
  const inputs = [...target.seeds, ...readInputs(folder), ...readInputs(found)];
  const current = openSync(`${folder}/reading.bin`, "w");
  const coverage = new Coverage();
  await coverage.start();
  const failures = new Map<string, string>();
  let [tries, kept] = [0, 0];

  function read(input: Uint8Array) {
    ftruncateSync(current, 0);
    writeSync(current, input, 0, input.length, 0);
    tries += 1;
    const failure = checkInput(target, input);
    const place = failure?.split("\n").slice(0, 3).join("\n").replace(/\d+/g, "#");
    if (failure === undefined || place === undefined || failures.has(place)) return;
    failures.set(place, keep(folder, "failed", input));
    console.log(`${failure}\n  saved as ${failures.get(place)}`);
  }

  for (const input of inputs) read(input);
  coverage.add(await coverage.takeNew());
  while (Date.now() < untilMs && failures.size < MOST_FAILURES) {
    const batch = Array.from({ length: BATCH }, () => mutate(target, inputs, random.integer));
    for (const input of batch) read(input);
    const news = await coverage.takeNew();
    if (news.size === 0) continue;

    // Reading the counts takes as long as many inputs, so it is done once per batch.
    for (const input of batch) {
      read(input);
      const reached = [...(await coverage.takeNew())].filter((block) => news.has(block));
      if (reached.length === 0) continue;
      coverage.add(reached);
      inputs.push(input);
      keep(found, "covers", input);
      if (options.keep && kept++ < MOST_KEPT) keep(folder, "covers", input);
    }
    coverage.add(news);
  }

  rmSync(`${folder}/reading.bin`);
  return rowOf(`fuzz ${name}, seed ${options.seed}`, `${tries} inputs`, [
    [`${coverage.size} blocks of code`, true],
    [`${inputs.length} inputs to mutate`, true],
    ...[...failures].map(([place, path]) => [`${place.split("\n")[0]}: ${path}`, false] as const),
  ]);
}

/** As V8 counts blocks of code. */
class Coverage {
  readonly #session = new Session();
  readonly #seen = new Set<string>();

  async start(): Promise<void> {
    this.#session.connect();
    await this.#session.post("Profiler.enable");
    const precise = { callCount: true, detailed: true };
    await this.#session.post("Profiler.startPreciseCoverage", precise);
  }

  /** Of those that `add` has never named. */
  async takeNew(): Promise<Set<string>> {
    const found = new Set<string>();
    const { result } = await this.#session.post("Profiler.takePreciseCoverage");
    for (const { url, functions } of result) {
      if (!/\/(packages|apps)\/[^/]+\/src\/|msgpack/.test(url)) continue;
      for (const { startOffset, endOffset, count } of functions.flatMap(({ ranges }) => ranges)) {
        const key = `${url}:${startOffset}:${endOffset}`;
        if (count > 0 && !this.#seen.has(key)) found.add(key);
      }
    }
    return found;
  }

  add(blocks: Iterable<string>): void {
    for (const block of blocks) this.#seen.add(block);
  }

  get size(): number {
    return this.#seen.size;
  }
}
