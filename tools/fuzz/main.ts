// npm run fuzz -- [--target NAME,NAME] [--minutes N] [--seed N] [--keep]: mutated inputs against everything that reads the bytes of peers,
// clients and files. A failing input is saved in tools/fuzz/corpus, which `npm test` replays. --keep also saves inputs that reach new code.
import { parseArgs } from "node:util";
import { Worker } from "node:worker_threads";
import { keepInput, readCorpus } from "./corpus.js";
import type { FuzzReport, FuzzWork } from "./fuzz-messages.js";
import { MAX_INPUT_BYTES } from "./mutate.js";
import { TARGETS } from "./targets/index.js";

/** An input hangs that takes more processor time than this, or that is not done after `WAIT_MS`, when others use the processor too. */
const PROCESSOR_MS = 30_000;
const WAIT_MS = 600_000;
/** Readers bound their memory far below this. */
const MAX_HEAP_MB = 512;
const WORKER = new URL("./fuzz-worker.ts", import.meta.url).href;
/** With --keep, per target and run. */
const MOST_KEPT = 30;

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
if (!Number.isSafeInteger(seed)) stop(`--seed must be an integer, not ${JSON.stringify(values.seed)}`);

function stop(message: string): never {
  process.stderr.write(`${message}\n`);
  process.exit(2);
}

/** The process's processor time, nearly all of which the one thread takes, and the clock. */
function timesMs(): { processor: number; clock: number } {
  const { user, system } = process.cpuUsage();
  return { processor: Math.round((user + system) / 1000), clock: Date.now() };
}

/** Fuzzes one target in a thread of its own. Returns the number of failing inputs. */
async function fuzz(name: string): Promise<number> {
  const shared = new SharedArrayBuffer(8 + MAX_INPUT_BYTES * 2);
  const state = new Int32Array(shared, 0, 2);
  const workerData: FuzzWork = {
    name,
    seed,
    untilMs: Date.now() + minutes * 60_000,
    corpus: readCorpus(name).map(({ input }) => input),
    shared,
  };
  // A thread does not have the loader of TypeScript that its process has.
  const start = `import("tsx/esm/api").then(({ register }) => { register(); return import(${JSON.stringify(WORKER)}); })`;
  const worker = new Worker(start, {
    eval: true,
    workerData,
    resourceLimits: { maxOldGenerationSizeMb: MAX_HEAP_MB },
  });
  let failed = 0;
  let kept = 0;
  let summary = "ended early";
  const fail = (input: Uint8Array, failure: string) => {
    failed += 1;
    console.log(
      `FAIL  ${name}, seed ${seed}: ${failure}\n      saved as ${keepInput(name, input, "failed")}`,
    );
  };
  const currentInput = () => Uint8Array.from(new Uint8Array(shared, 8, Atomics.load(state, 1)));
  let begun = -1;
  let since = timesMs();
  const watch = setInterval(() => {
    const now = Atomics.load(state, 0);
    if (now !== begun) {
      begun = now;
      since = timesMs();
      return;
    }
    const { processor, clock } = timesMs();
    const taken = { processor: processor - since.processor, clock: clock - since.clock };
    if (taken.processor < PROCESSOR_MS && taken.clock < WAIT_MS) return;
    fail(currentInput(), `the input is read for ${taken.clock} ms, ${taken.processor} ms of processor time`);
    void worker.terminate();
  }, 1000);
  worker.on("message", (message: FuzzReport) => {
    if (message.kind === "failed") fail(message.input, message.failure);
    else if (message.kind === "done")
      summary = `${message.tries} inputs, ${message.blocks} blocks of code, ${message.inputs} inputs to mutate`;
    else if (values.keep && kept++ < MOST_KEPT) keepInput(name, message.input, "covers");
  });
  worker.on("error", (error) => fail(currentInput(), `the thread ended: ${error.message}`));
  await new Promise((resolve) => worker.once("exit", resolve));
  clearInterval(watch);
  console.log(`${failed === 0 ? "ok  " : "FAIL"}  ${name}: ${summary}, ${failed} failures`);
  return failed;
}

console.log(`seed ${seed}, ${minutes} minutes for each of ${names.length} targets`);
let failures = 0;
for (const name of names) failures += await fuzz(name);
process.exitCode = failures === 0 ? 0 : 1;
