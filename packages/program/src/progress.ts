import { printError } from "./print.js";

const INTERVAL_MS = 3_000;

/**
 * Writes what a long run has done to stderr, first after 3 s, until it is disposed. `name`: the
 * program's; `state`: such as `40 of 100 prompts answered`.
 */
export function showProgress(name: string, state: () => string, write = printError): Disposable {
  const startedMs = performance.now();
  const timer = setInterval(() => {
    const seconds = (performance.now() - startedMs) / 1000;
    write(`${name}: ${state()}, ${seconds.toFixed(0)} s\n`);
  }, INTERVAL_MS).unref();
  return { [Symbol.dispose]: () => clearInterval(timer) };
}
