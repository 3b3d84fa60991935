// Two prefill servers and a decode server that answer as vLLM with bidirectional_kv_xfer does, as far as ended turns go. Prints {"prefills": [ports], "decode": port}. Each line of the
// input is answered by one of JSON: `restart` gives the decode server a new engine, `fail` and `break` have a next read fail, `state` tells what is held and what went wrong.
import { createInterface } from "node:readline";
import { type Answer, type Seen, startUpstream } from "@kv/testing/http/fake-upstream";
import { TurnServers } from "../packages/proxy/test/readback/turn-servers.js";

const turns = new TurnServers();
turns.cacheBlocks = 40_000;
/** Health checks are no requests of an engine. */
const serve = (answer: Answer) =>
  startUpstream((seen) =>
    seen.method === "GET" && seen.path !== "/metrics" ? void seen.response.end("{}") : answer(seen),
  );
const servers = await Promise.all([turns.prefill, turns.prefill, turns.decode].map(serve));
// They keep all requests.
setInterval(() => {
  for (const { seen } of servers) (seen as Seen[]).length = 0;
}, 1000).unref();
const [first, second, third] = servers.map(({ url }) => Number(new URL(url).port));
process.stdout.write(`${JSON.stringify({ prefills: [first, second], decode: third })}\n`);
for await (const line of createInterface({ input: process.stdin })) {
  if (line === "restart") turns.restartDecoder();
  if (line === "fail") turns.failures.push("500");
  if (line === "break") turns.failures.push("break");
  const { wrong, counts, pinned } = turns;
  process.stdout.write(`${JSON.stringify({ wrong: wrong.slice(0, 5), counts, pinned: pinned.size })}\n`);
}
process.exit(0);
