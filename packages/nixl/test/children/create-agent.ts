// Creates an agent with the backends of the environment, and prints the error, what was logged, and
// a variable that the addon sets for UCX as JSON.
import { setTimeout as sleep } from "node:timers/promises";
import { KvError, type Log } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";

const logged: string[] = [];
const note = (event: string) => void logged.push(event);
const log: Log = { debug() {}, info() {}, warn: note, error: note };
const transport = nixlTransport({ log });
const error: unknown = await transport.createAgent().then(
  () => undefined,
  (caught: unknown) => caught,
);
// What its thread reports comes with its first turns.
if (error === undefined) await sleep(100);
const { code, message, hint } = KvError.is(error)
  ? error
  : { code: "none", message: String(error), hint: "" };
console.log(JSON.stringify({ code, message, hint, logged, quota: process.env.UCX_CMA_TX_QUOTA }));
await transport.close();
