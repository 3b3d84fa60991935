// npm run fuzz -- [--target NAME,NAME] [--minutes N] [--seed N] [--keep]: mutated inputs against
// everything that reads the bytes of peers, clients and files. A failing input is saved in
// tools/fuzz/corpus, which `npm test` replays. --keep also saves inputs that reach new code.
import { parseArgs } from "node:util";
import { Worker } from "node:worker_threads";
import { keepInput, readCorpus } from "./corpus.js";
import { type FuzzReport, type FuzzWork, NOT_READING } from "./fuzz-messages.js";
import { MAX_INPUT_BYTES } from "./mutate.js";
import { TARGETS } from "./targets/index.js";

/**
 * An input hangs that takes more processor time than this, or that is not done after `WAIT_MS`,
 * when others use the processor too.
 */
const PROCESSOR_MS = 30_000;
const WAIT_MS = 600_000;
/** Readers bound their memory far below this. */
const MAX_HEAP_MB = 512;
const WORKER = new URL("./fuzz-worker.ts", import.meta.url).href;
/** With --keep, per target and run. */
const MOST_KEPT = 30;
const MOST_FAILURES = 20;
/** A new thread begins after this time: V8's counts take more memory the longer they run. */
const ROUND_MS = 60_000;

const { values } = parseArgs({
  options: {
    target: { type: "string", default: Object.keys(TARGETS).join(",") },
    minutes: { type: "string", default: "1" },
    seed: { type: "string", default: `${Date.now() % 2 ** 31}` },
    keep: { type: "boolean", default: false },
  },
});
const names = values.target.split(",");
const minutes = Number(values.minutes);
const seed = Number(values.seed);
for (const name of names) {
  if (TARGETS[name] !== undefined) continue;
  stop(`--target must be of ${Object.keys(TARGETS).join(", ")}, not ${JSON.stringify(name)}`);
}
if (!(minutes > 0)) stop(`--minutes must be above 0, not ${JSON.stringify(values.minutes)}`);
if (!Number.isSafeInteger(seed))
  stop(`--seed must be an integer, not ${JSON.stringify(values.seed)}`);

function stop(message: string): never {
  process.stderr.write(`${message}\n`);
  process.exit(2);
}

/** The process's processor time, nearly all of which the one thread takes, and the clock. */
function timesMs(): { processor: number; clock: number } {
  const { user, system } = process.cpuUsage();
  return { processor: Math.round((user + system) / 1000), clock: Date.now() };
}

/** What a thread has done, and the inputs that reached new code. */
interface Round {
  readonly failed: number;
  readonly tries: number;
  readonly blocks: number;
  readonly covers: readonly Uint8Array[];
}

/** Fuzzes one target until the time is over. Returns the number of failing inputs. */
async function fuzz(name: string): Promise<number> {
  const endMs = Date.now() + minutes * 60_000;
  const inputs = readCorpus(name).map(({ input }) => input);
  let [failed, tries, blocks, kept] = [0, 0, 0, 0];
  for (let round = 0; Date.now() < endMs && failed < MOST_FAILURES; round += 1) {
    const untilMs = Math.min(endMs, Date.now() + ROUND_MS);
    const { covers, ...done } = await fuzzInThread(name, {
      seed: seed + round,
      untilMs,
      corpus: inputs,
    });
    failed += done.failed;
    tries += done.tries;
    blocks = Math.max(blocks, done.blocks);
    inputs.push(...covers);
    if (!values.keep) continue;
    for (const input of covers) if (kept++ < MOST_KEPT) keepInput(name, input, "covers");
  }
  const summary = `${tries} inputs, ${blocks} blocks of code, ${inputs.length} inputs to mutate`;
  console.log(`${failed === 0 ? "ok  " : "FAIL"}  ${name}: ${summary}, ${failed} failures`);
  return failed;
}

/** Fuzzes one target in a thread of its own. */
async function fuzzInThread(
  name: string,
  work: Pick<FuzzWork, "seed" | "untilMs" | "corpus">,
): Promise<Round> {
  const shared = new SharedArrayBuffer(8 + MAX_INPUT_BYTES * 2);
  const state = new Int32Array(shared, 0, 2);
  const workerData: FuzzWork = { ...work, name, shared };
  // A thread does not have the loader of TypeScript that its process has.
  const start = `import("tsx/esm/api").then(({ register }) => { register(); return import(${JSON.stringify(WORKER)}); })`;
  const worker = new Worker(start, {
    eval: true,
    workerData,
    resourceLimits: { maxOldGenerationSizeMb: MAX_HEAP_MB },
  });
  let [failed, tries, blocks] = [0, 0, 0];
  const covers: Uint8Array[] = [];
  const fail = (input: Uint8Array, failure: string) => {
    failed += 1;
    console.log(
      `FAIL  ${name}, seed ${work.seed}: ${failure}\n      saved as ${keepInput(name, input, "failed")}`,
    );
  };
  const currentInput = () =>
    Uint8Array.from(new Uint8Array(shared, 8, Math.max(0, Atomics.load(state, 1))));
  let begun = -1;
  let since = timesMs();
  const watch = setInterval(() => {
    const now = Atomics.load(state, 0);
    if (now !== begun || Atomics.load(state, 1) === NOT_READING) {
      begun = now;
      since = timesMs();
      return;
    }
    const { processor, clock } = timesMs();
    const taken = { processor: processor - since.processor, clock: clock - since.clock };
    if (taken.processor < PROCESSOR_MS && taken.clock < WAIT_MS) return;
    clearInterval(watch);
    fail(
      currentInput(),
      `the input is read for ${taken.clock} ms, ${taken.processor} ms of processor time`,
    );
    void worker.terminate();
  }, 1000);
  worker.on("message", (message: FuzzReport) => {
    if (message.kind === "failed") fail(message.input, message.failure);
    else if (message.kind === "covers") covers.push(message.input);
    else ({ tries, blocks } = message);
  });
  worker.on("error", (error) => fail(currentInput(), `the thread ended: ${error.message}`));
  await new Promise((resolve) => worker.once("exit", resolve));
  clearInterval(watch);
  return { failed, tries, blocks, covers };
}

console.log(`seed ${seed}, ${minutes} minutes for each of ${names.length} targets`);
let failures = 0;
for (const name of names) failures += await fuzz(name);
process.exitCode = failures === 0 ? 0 : 1;
