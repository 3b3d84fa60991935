import { setTimeout as sleep } from "node:timers/promises";
import type { Attack } from "./attack.js";
import { portOf, postText, stranger, strangers } from "./strangers.js";

const REQUESTS = 1_000_000;
const LINE_BYTES = 64 << 20;

/** Not the proxy's: limits per address must not hit the honest. */
const ADDRESS = "127.0.0.66";
const HELD_BYTES = 4_000_000;
const FORGED = {
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
};

export const PROGRAM_ATTACKS: Readonly<Record<string, Attack>> = {
  "bench-listen": {
    title: "kv-nixl bench --listen: connections, endless lines, answers that are not read",
    victim: "bench",
    tries: `2000 connections, 8 lines of ${LINE_BYTES >> 20} MiB, 2 times ${REQUESTS} requests`,
    floods: false,
    async round({ benchPort }) {
      const silent = await strangers(2000, benchPort, "");
      const long = await strangers(8, benchPort, Buffer.alloc(LINE_BYTES, "x"));
      await sleep(1000);
      for (const socket of [...silent, ...long]) socket.destroy();
      await sleep(500);

      const deaf = await stranger(benchPort, '{"do":"fill","seed":1}\n'.repeat(REQUESTS));
      deaf.pause();
      const malformed = await stranger(benchPort, '{"do":"nothing"}\n'.repeat(REQUESTS));
      malformed.resume();
      await sleep(4000);
    },
  },
  "instance-http": {
    title:
      "an instance's HTTP: held bodies, slow headers, nesting, objects, pipelining, forged releases",
    victim: "demo",
    tries: "65320 connections and requests",
    rounds: 5,
    async round({ instanceUrl }) {
      const port = portOf(instanceUrl);
      const objects = Array.from({ length: 250_000 }, (_, at) => `"k${at}":{}`).join(",");

      await strangers(
        100,
        port,
        Buffer.from(postText(" ".repeat(HELD_BYTES - 1), HELD_BYTES)),
        ADDRESS,
      );
      await sleep(1000);
      await strangers(5000, port, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ", ADDRESS);
      await sleep(500);
      await strangers(10, port, postText(`{"prompt":${"[".repeat(1_000_000)}`), ADDRESS);
      await strangers(
        10,
        port,
        postText(`{"prompt":[1],"kv_transfer_params":{${objects}}}`),
        ADDRESS,
      );
      await sleep(500);
      await stranger(port, postText('{"prompt":"x","max_tokens":1}').repeat(30_000), ADDRESS);
      await stranger(port, "GET /status HTTP/1.1\r\nHost: x\r\n\r\n".repeat(30_000), ADDRESS);
      await strangers(200, port, postText(JSON.stringify(FORGED)), ADDRESS);
      await sleep(1000);
    },
  },
};
