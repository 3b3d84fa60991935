// Imported before the measured program: tells its parent how much processor time its main thread
// took at most between two chances of other work.
import { readFileSync } from "node:fs";
import { isMainThread } from "node:worker_threads";

const threadMs = () =>
  Number(readFileSync("/proc/thread-self/schedstat", "latin1").split(" ")[0]) / 1e6;

if (isMainThread) {
  let [before, longest] = [threadMs(), 0];
  setInterval(() => {
    const now = threadMs();
    longest = Math.max(longest, now - before);
    before = now;
  }, 2).unref();
  setInterval(() => {
    process.send?.(longest);
    longest = 0;
  }, 500).unref();
}
