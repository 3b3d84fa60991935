// Prints the share of a core, in percent, that this process uses while idle: with an open agent, or
// without one.
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
