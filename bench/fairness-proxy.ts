// A kv-proxy whose prefill instances publish KV events at the endpoints of argv: `PREFILL DECODE ENDPOINT`. Prints its URL; then, twice a second, how much processor time its
// main thread took at most between two chances of other work, in ms.
import { readFileSync } from "node:fs";
import { createProxy } from "@kv/proxy";

const [prefill = "", decode = "", kvEvents = ""] = process.argv.slice(2);
const proxy = createProxy({
  prefillers: [{ url: prefill }, { url: prefill.replace("127.0.0.1", "localhost"), kvEvents }],
  decoders: [decode],
  routing: { prefill: "prefix-aware", decode: "round-robin" },
  pairing: { mode: "off" },
  // The load of one address is what is measured.
  limits: { requestsPerClient: 10_000, bodiesPerClientLengthBytes: 2 ** 27 },
});
const { url } = await proxy.listen({ port: 0 });
process.stdout.write(`${url}\n`);

/** Processor time of this thread, in ms. */
const threadMs = () => Number(readFileSync("/proc/thread-self/schedstat", "latin1").split(" ")[0]) / 1e6;
let before = threadMs();
let longest = 0;
setInterval(() => {
  const now = threadMs();
  longest = Math.max(longest, now - before);
  before = now;
}, 2);
setInterval(() => {
  process.stdout.write(`${longest}\n`);
  longest = 0;
}, 500);
process.stdin.on("end", () => process.exit(0)).resume();
