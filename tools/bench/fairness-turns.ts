// Imported before the program that is measured: prints `turn MS` twice a second: how much processor
// time its main thread took at most between two chances of other work.
import { readFileSync } from "node:fs";
import { isMainThread } from "node:worker_threads";

/** Processor time of this thread, in ms. */
const threadMs = () =>
  Number(readFileSync("/proc/thread-self/schedstat", "latin1").split(" ")[0]) / 1e6;
let before = threadMs();
let longest = 0;
const every = (ms: number, what: () => void) => isMainThread && setInterval(what, ms).unref();
every(2, () => {
  const now = threadMs();
  longest = Math.max(longest, now - before);
  before = now;
});
every(500, () => {
  process.stdout.write(`turn ${longest}\n`);
  longest = 0;
});
