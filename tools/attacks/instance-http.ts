// A stranger who reaches a decode instance's HTTP: held bodies, slow headers, nesting, small
// objects, pipelining, connections.
import type { Socket } from "node:net";
import type { AttackResult, FloodTarget } from "./support/attack.js";
import { postText } from "./support/attacked-proxy.js";
import { Demo, demoAbsence } from "./support/demo.js";
import { pause, stranger, strangers } from "./support/stranger.js";

const HELD_BODIES = 100;
const HELD_BYTES = 4_000_000;
const SLOW_CONNECTIONS = 5000;
const PIPELINED = 30_000;
const SECONDS = 20;
const MOST_GROWTH_MIB = 512;

const NESTED = `{"prompt":${"[".repeat(1_000_000)}`;
const OBJECTS = `{"prompt":[1],"kv_transfer_params":{${Array.from({ length: 250_000 }, (_, i) => `"k${i}":{}`).join(",")}}}`;
const FORGED = JSON.stringify({
  prompt: [1, 2, 3],
  use_beam_search: true,
  kv_transfer_params: {
    do_remote_prefill: true,
    remote_engine_id: "nobody",
    remote_request_id: "r",
    remote_host: "127.0.0.1",
    remote_port: 9,
    remote_block_ids: [[1]],
  },
});

/** One turn of every form. Returns the number of requests and connections. */
async function round(url: string, signal: AbortSignal): Promise<number> {
  const { hostname, port } = new URL(url);
  const at = [hostname, Number(port)] as const;
  const sockets: Socket[] = [];
  const add = (more: Socket[]) => sockets.push(...more);
  try {
    add(
      await strangers(
        HELD_BODIES,
        ...at,
        Buffer.from(postText(" ".repeat(HELD_BYTES - 1), HELD_BYTES)),
      ),
    );
    await pause(1000, signal);
    add(
      await strangers(
        SLOW_CONNECTIONS,
        ...at,
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ",
      ),
    );
    await pause(500, signal);
    for (const body of [NESTED, OBJECTS]) add(await strangers(10, ...at, postText(body)));
    await pause(500, signal);
    add([await stranger(...at, postText('{"prompt":"x","max_tokens":1}').repeat(PIPELINED))]);
    add([await stranger(...at, "GET /status HTTP/1.1\r\nHost: x\r\n\r\n".repeat(PIPELINED))]);
    add(await strangers(200, ...at, postText(FORGED)));
    await pause(1000, signal);
    return HELD_BODIES + SLOW_CONNECTIONS + 20 + 2 * PIPELINED + 200;
  } finally {
    for (const socket of sockets) socket.destroy();
  }
}

/** Repeats the rounds. */
export async function flood({ decodeUrl }: FloodTarget, signal: AbortSignal): Promise<void> {
  while (!signal.aborted) await round(decodeUrl, signal);
}

/** Attacks the decode instance of a demo whose proxy serves honest clients. */
export async function run(): Promise<AttackResult> {
  const attack =
    "an instance's HTTP: held bodies, slow headers, nesting, objects, pipelining, forged releases";
  const absence = await demoAbsence();
  if (absence !== undefined)
    return { attack, tries: "none", result: `SKIPPED: ${absence}`, ok: process.env.CI !== "true" };
  const demo = await Demo.start();
  try {
    await demo.measure(3);
    const calm = await demo.measure(10);
    const grown = demo.processes.D.watchMemory();
    const ended = new AbortController();
    let tries = 0;
    const attacking = (async () => {
      while (!ended.signal.aborted) tries += await round(demo.target.decodeUrl, ended.signal);
    })();
    const seen = await demo.measure(SECONDS);
    ended.abort();
    await attacking;
    const growthMib = grown();
    const after = await demo.measure(3);
    const failures = (measured: typeof seen) =>
      Object.keys(measured.failed).length + measured.wrong;
    return {
      attack,
      tries: `${tries} connections and requests in ${SECONDS} s`,
      result: `${seen.right} right, ${seen.wrong} wrong, failed ${JSON.stringify(seen.failed)}; p99 ${calm.p99Ms} → ${seen.p99Ms} ms, longest ${seen.longestMs} ms; D +${growthMib} MiB; afterwards ${after.right} right`,
      ok: seen.right > 0 && failures(seen) + failures(after) === 0 && growthMib <= MOST_GROWTH_MIB,
    };
  } finally {
    demo.close();
  }
}
