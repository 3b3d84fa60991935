// The kernel refuses a thread to the addon, as at a limit of threads or of memory. `agent` or
// `memory` names what asks for it.
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { setTimeout } from "node:timers/promises";
import { KvError } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { loadAddon } from "../../src/addon/load-addon.js";

const transport = nixlTransport({ library: process.env["FAKE_NIXL"] });
const addon = loadAddon();
const limitMemory = (soft: string) =>
  execFileSync("prlimit", [`--as=${soft}:unlimited`, `--pid=${process.pid}`]);
const codeOf = (error: unknown) =>
  KvError.is(error) ? `${error.code}: ${error.message}` : String(error);
const attempts: Readonly<Record<string, () => Promise<string>>> = {
  agent: () => transport.createAgent().then(() => "made", codeOf),
  async memory() {
    try {
      transport.allocate(4096);
      return "made";
    } catch (error) {
      return codeOf(error);
    }
  },
};
const attempt = attempts[process.argv[2] ?? ""];
// Everything that the attempt needs is loaded now.
transport.allocate(4096, { populate: false }).close();
const first = await transport.createAgent();
await first.close();
// Room for everything but the stack of a thread, 8 MiB. The stacks of threads that still end are
// gone by then.
let pages = Number.POSITIVE_INFINITY;
for (let time = 0; time < 10; time++) {
  pages = Math.min(pages, Number(readFileSync("/proc/self/statm", "latin1").split(" ")[0]));
  await setTimeout(20);
}
limitMemory(`${pages * 4096 + (4 << 20)}`);
// V8 may give memory back meanwhile.
let refused = "made";
for (let time = 0; time < 200 && refused === "made"; time++)
  refused = (await attempt?.()) ?? "no such attempt";
limitMemory("unlimited");
globalThis.gc?.();
await (await transport.createAgent()).close();
await transport.close();
process.stdout.write(JSON.stringify({ refused, stopped: addon.stopAll() }));
