// A stranger at `kv-nixl bench --listen`: connections, endless lines, requests without reading the
// answers, nothing at all.
import { connect } from "node:net";
import type { AttackResult } from "./support/attack.js";
import { ObservedProcess } from "./support/observed-process.js";
import { pause, stranger, strangers } from "./support/stranger.js";

const CONNECTIONS = 2000;
const LINE_BYTES = 64 << 20;
const REQUESTS = 1_000_000;
const MOST_GROWTH_MIB = 256;
const MOST_WAIT_MS = 2000;

const FILL = '{"do":"fill","seed":1}\n';

/** An honest session's request and answer, from another address; the time that it took. */
async function ask(port: number): Promise<number> {
  const begun = performance.now();
  const socket = connect({ host: "127.0.0.1", port, localAddress: "127.0.0.9" });
  try {
    socket.write(FILL);
    for await (const chunk of socket) {
      if (String(chunk).includes("begins with open")) return performance.now() - begun;
    }
    throw new Error("no answer");
  } finally {
    socket.destroy();
  }
}

/** Attacks a target in a process of its own. */
export async function run(): Promise<AttackResult> {
  const target = new ObservedProcess("packages/nixl/src/cli.ts", [
    "bench",
    "--listen",
    "127.0.0.1:0",
  ]);
  try {
    const port = Number(/:(\d+);/.exec(await target.line())?.[1]);
    await ask(port);
    const grown = target.watchMemory();
    let running = true;
    const honest = (async () => {
      let [right, longestMs] = [0, 0];
      const failures: string[] = [];
      while (running) {
        try {
          longestMs = Math.max(longestMs, await ask(port));
          right += 1;
        } catch (error) {
          failures.push((error as Error).message);
        }
        await pause(20);
      }
      return { right, longestMs: Math.round(longestMs), failures };
    })();
    const at = ["127.0.0.1", port] as const;
    const silent = await strangers(CONNECTIONS, ...at, "");
    const long = await strangers(8, ...at, Buffer.alloc(LINE_BYTES, "x"));
    await pause(1000);
    for (const socket of [...silent, ...long]) socket.destroy();
    await pause(500);
    const deaf = await stranger(...at, FILL.repeat(REQUESTS));
    deaf.pause();
    const malformed = await stranger(...at, '{"do":"nothing"}\n'.repeat(REQUESTS));
    malformed.resume();
    await pause(4000);
    running = false;
    const { right, longestMs, failures } = await honest;
    const growthMib = grown();
    for (const socket of [deaf, malformed]) socket.destroy();
    return {
      attack: "kv-nixl bench --listen: connections, endless lines, answers that are not read",
      tries: `${CONNECTIONS} connections, 8 lines of ${LINE_BYTES >> 20} MiB, 2 times ${REQUESTS} requests`,
      result: `${right} honest sessions, ${failures.length} failed, longest ${longestMs} ms; +${growthMib} MiB`,
      ok:
        target.isRunning &&
        right > 0 &&
        failures.length === 0 &&
        growthMib <= MOST_GROWTH_MIB &&
        longestMs <= MOST_WAIT_MS,
    };
  } finally {
    target.kill();
  }
}
