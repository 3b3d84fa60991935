// Drops an agent without close(), and prints what is logged of it, and whether its thread goes on
// until the transport is closed, as JSON.
import { setTimeout as sleep } from "node:timers/promises";
import { type LogFields, silentLog } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { threadNames } from "../support/thread-names.js";

const { gc } = globalThis as { gc?: () => void };
const logged: LogFields[] = [];
const warn = (event: string, fields: LogFields = {}) => void logged.push({ event, ...fields });
const transport = nixlTransport({
  library: process.argv[2],
  backends: ["UCX"],
  log: { ...silentLog, warn },
});

async function makeAgents(): Promise<void> {
  const kept = await transport.createAgent({ name: "closed" });
  await kept.close();
  await transport.createAgent({ name: "dropped" });
}

const threads = () => threadNames().filter((name) => name === "kv_nixl").length;

await makeAgents();
for (let round = 0; round < 50 && logged.length === 0; round++) {
  gc?.();
  await sleep(20);
}
const running = threads();
await transport.close();
console.log(JSON.stringify({ logged, running, left: threads() }));
