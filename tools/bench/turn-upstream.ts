// They answer as vLLM with bidirectional_kv_xfer does. Each line of the input, `{ "do": … }`, is
// answered: `restart` gives the decode server a new engine, `fail` and `break` have a next read
// fail; all tell the addresses, what is held and what went wrong.
import { createInterface } from "node:readline";
import { type Answer, type Seen, startUpstream } from "@kv/testing/http/fake-upstream";
import { TurnServers } from "../../packages/proxy/test/readback/turn-servers.js";

const turns = new TurnServers();
turns.cacheBlocks = 40_000;
const serve = (answer: Answer) =>
  startUpstream((seen) =>
    seen.method === "GET" && seen.path !== "/metrics" ? void seen.response.end("{}") : answer(seen),
  );
const servers = await Promise.all([turns.prefill, turns.prefill, turns.decode].map(serve));
// They keep all requests.
setInterval(() => {
  for (const { seen } of servers) (seen as Seen[]).length = 0;
}, 1000).unref();
const [first, second, decode] = servers.map(({ url }) => url);
for await (const line of createInterface({ input: process.stdin })) {
  const command = (JSON.parse(line) as { do: string }).do;
  if (command === "restart") turns.restartDecoder();
  if (command === "fail") turns.failures.push("500");
  if (command === "break") turns.failures.push("break");
  const { wrong, counts, pinned } = turns;
  const state = {
    prefills: [first, second],
    decode,
    wrong: wrong.slice(0, 5),
    counts,
    pinned: pinned.size,
  };
  process.stdout.write(`${JSON.stringify(state)}\n`);
}
process.exit(0);
