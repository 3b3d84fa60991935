// The thread that reads mutated inputs. The main thread sees in `shared` which one is being read,
// and ends this thread when it hangs.
import { parentPort, workerData } from "node:worker_threads";
import { checkInput } from "./check-input.js";
import { Coverage } from "./coverage.js";
import { type FuzzReport, type FuzzWork, NOT_READING } from "./fuzz-messages.js";
import { mutate, seededPick } from "./mutate.js";
import { TARGETS } from "./targets/index.js";

const { name, seed, untilMs, corpus, shared } = workerData as FuzzWork;
const target = TARGETS[name];
if (target === undefined) throw new Error(`no target ${name}`);
const state = new Int32Array(shared, 0, 2);
const current = new Uint8Array(shared, 8);
const pick = seededPick(seed);
const inputs = [...target.seeds, ...corpus];
const coverage = new Coverage();
const failures = new Set<string>();
const BATCH = 100;
const MOST_FAILURES = 20;
let tries = 0;

function read(input: Uint8Array): void {
  current.set(input);
  Atomics.store(state, 1, input.length);
  Atomics.add(state, 0, 1);
  tries += 1;
  const failure = checkInput(target as NonNullable<typeof target>, input);
  Atomics.store(state, 1, NOT_READING);
  if (failure === undefined) return;
  // One report for one place in the code.
  const place = failure.split("\n").slice(0, 3).join("\n").replace(/\d+/g, "#");
  if (failures.has(place)) return;
  failures.add(place);
  report({ kind: "failed", input, failure });
}

function report(message: FuzzReport): void {
  parentPort?.postMessage(message);
}

for (const input of inputs) read(input);
coverage.add(coverage.takeNew());
while (Date.now() < untilMs && failures.size < MOST_FAILURES) {
  const batch = Array.from({ length: BATCH }, () => mutate(target, inputs, pick));
  for (const input of batch) read(input);
  const news = coverage.takeNew();
  if (news.size === 0) continue;
  // The counts are read once per batch, because that takes as long as many inputs. The inputs that
  // reached new code are found by themselves.
  for (const input of batch) {
    read(input);
    const reached = [...coverage.takeNew()].filter((block) => news.has(block));
    if (reached.length === 0) continue;
    coverage.add(reached);
    inputs.push(input);
    report({ kind: "covers", input });
  }
  coverage.add(news);
}
report({ kind: "done", tries, blocks: coverage.size });
