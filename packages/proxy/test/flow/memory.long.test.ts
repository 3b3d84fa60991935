// A long suite: measures memory over many requests.
import { setTimeout as sleep } from "node:timers/promises";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { COMPLETION, sendJson } from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { runProxy, upstream } from "../support/set-up.js";

setFlagsFromString("--expose-gc");
const collect = runInNewContext("gc") as () => void;

const WARM_UP = 500;
const REQUESTS = 700;
/** A request uses at least 20 kB while it is served. */
const MOST_BYTES = 2_000;

test.each(["pull", "push"] as const)(
  "%s: frees a request's memory after its answer",
  { timeout: 120_000 },
  async (mode) => {
    const kv_transfer_params = {
      do_remote_prefill: true,
      remote_block_ids: [[1]],
      remote_engine_id: "e",
      remote_request_id: "r",
      remote_host: "10.0.0.1",
      remote_port: 5601,
      tp_size: 1,
      transfer_mode: mode,
    };
    const answer = { id: "x", choices: [{ text: "a" }], kv_transfer_params };
    const p = await upstream(({ response }) => sendJson(response, answer));
    const d = await upstream(({ response }) => sendJson(response, COMPLETION));
    const prefillers = [{ url: p.url, kv: { engineId: "e" } }];
    const { ask } = await runProxy({ mode, prefillers, decoders: [d.url] });
    const heapAfter = async (requests: number) => {
      for (let sent = 0; sent < requests; sent += 1) {
        await (await ask()).text();
      }
      // The two stubs record their requests.
      for (const { seen } of [p, d]) (seen as unknown[]).length = 0;
      await sleep(300);
      collect();
      return process.memoryUsage().heapUsed;
    };
    const before = await heapAfter(WARM_UP);
    expect(((await heapAfter(REQUESTS)) - before) / REQUESTS).toBeLessThan(MOST_BYTES);
  },
);
