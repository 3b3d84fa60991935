// Prints how much of a core this process takes while it does nothing, in percent: with an agent that is open and idle, or with none.
import { nixlTransport } from "@kv/nixl";

const SETTLE_MS = 500;
const MEASURE_MS = 2000;
const pause = (ms: number) => new Promise((resolve) => setTimeout(resolve, ms));

const transport = nixlTransport();
if (process.argv[2] === "agent") await transport.createAgent();
await pause(SETTLE_MS);
const before = process.cpuUsage();
await pause(MEASURE_MS);
const { user, system } = process.cpuUsage(before);
console.log((user + system) / 10 / MEASURE_MS);
await transport.close();
