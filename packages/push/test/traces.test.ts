import { fileURLToPath } from "node:url";
import type { KvTransferParams } from "@kv/interface";
import { prompt, started } from "@kv/testing/scenarios/scenario";
import { coordinatesOf, type SimEngine } from "@kv/testing/simulator/sim-engine";
import type { SimEngineOptions } from "@kv/testing/simulator/sim-options";
import { type TracePlay, traceTests } from "@kv/testing/traces/trace-tests";
import { pushConnector } from "../src/index.js";

/** One client request as vLLM names it at P and at D: the suffixes of eight digits differ. */
const legs = (n: number) => ({
  prefill: { ...prompt(n), requestId: `r${n}-aaaaaaaa` },
  decode: { ...prompt(n), requestId: `r${n}-dddddddd` },
});

const prefilled = (play: TracePlay, p: SimEngine, n = 1) => play.prefilled(p, n, legs(n).prefill);

/** D's leg. Without P's parameters, the proxy has sent both legs at once. */
const decoded = (
  p: SimEngine,
  d: SimEngine,
  n = 1,
  params: KvTransferParams = coordinatesOf(p, `r${n}`),
) => started(d.decode({ ...legs(n).decode, params }));

/** Both legs, one after the other. */
const prefillFirst =
  (ofP: Partial<SimEngineOptions> = {}, ofD: Partial<SimEngineOptions> = {}) =>
  async (play: TracePlay) => {
    const { p, d } = await play.pair(ofP, ofD);
    await play.outcome(decoded(p, d, 1, await prefilled(play, p)));
  };

traceTests(fileURLToPath(new URL("./traces", import.meta.url)), pushConnector, {
  "prefill-first": {
    about: ["P has computed the prompt when D registers its blocks. P WRITEs all of them."],
    play: prefillFirst(),
  },

  "decode-first": {
    about: [
      "The proxy has sent both legs at once. D registers its blocks before P computes the prompt.",
      "P finds its own request by the name without the suffix.",
    ],
    async play(play) {
      const { p, d } = await play.pair();
      const decoding = decoded(p, d);
      await play.clock.advance(20);
      await prefilled(play, p);
      await play.outcome(decoding);
    },
  },

  "layer-wise": {
    about: [
      "push_layerwise. P WRITEs layer 0 while it computes layer 1. The last WRITE has the notification with it.",
    ],
    async play(play) {
      const { p, d } = await play.pair({
        extra: { push_layerwise: true },
        reportsLayers: true,
        stepMs: 20,
      });
      const decoding = decoded(p, d);
      await play.clock.advance(20);
      await prefilled(play, p);
      await play.outcome(decoding);
    },
  },

  "partial-prefix-hit": {
    about: ["D's prefix cache has the first block of the prompt. D registers the others."],
    async play(play) {
      const { p, d } = await play.pair();
      const params = await prefilled(play, p);
      await play.outcome(d.decode({ ...legs(1).decode, params, cachedTokens: 16 }));
    },
  },

  "full-prefix-hit": {
    about: [
      "D's prefix cache has the whole prompt. D withdraws without a registration: P frees its blocks and WRITEs nothing.",
    ],
    async play(play) {
      const { p, d } = await play.pair();
      const params = await prefilled(play, p);
      await play.outcome(d.decode({ ...legs(1).decode, params, cachedTokens: 40 }));
    },
  },

  "tp-2-to-1": {
    about: [
      "P has two ranks, D has one. D registers with both, and waits for both. Each WRITEs its heads.",
    ],
    play: prefillFirst({ tpSize: 2 }),
  },

  "d-aborts-while-p-computes": {
    about: [
      "The client leaves while P computes. D withdraws its blocks, and P's answer gives them back.",
    ],
    afterMs: 100,
    async play(play) {
      const { p, d } = await play.pair({ stepMs: 50 });
      const decoding = decoded(p, d);
      await play.clock.advance(20);
      const computing = started(p.prefill(legs(1).prefill));
      await play.clock.advance(60);
      d.abort(legs(1).decode.requestId);
      await play.outcome(decoding);
      await play.outcome(computing);
    },
  },

  "d-aborts-during-write": {
    about: [
      "The client leaves during the WRITE. D keeps its blocks until P says that no WRITE touches them any more.",
    ],
    faults: [{ fault: "delay", operation: "WRITE", delayMs: 500 }],
    async play(play) {
      const { p, d } = await play.pair();
      const params = await prefilled(play, p);
      const decoding = decoded(p, d, 1, params);
      await play.clock.advance(100);
      d.abort(legs(1).decode.requestId);
      await play.outcome(decoding);
    },
  },

  "slow-write": {
    about: ["The WRITE takes longer than P's lease of 6 s. D's heartbeats extend the lease."],
    faults: [{ fault: "delay", operation: "WRITE", delayMs: 8000 }],
    async play(play) {
      const extra = { kv_lease_duration: 6 };
      const { p, d } = await play.pair({ extra }, { extra });
      const params = await prefilled(play, p);
      await play.outcome(decoded(p, d, 1, params));
    },
  },

  "lease-expires-during-write": {
    about: [
      "The WRITE takes longer than P's lease of 6 s, and D's next heartbeat would come after 10 s.",
      "P keeps the blocks until the WRITE has ended, and D gets its KV.",
    ],
    faults: [{ fault: "delay", operation: "WRITE", delayMs: 8000 }],
    play: prefillFirst({ extra: { kv_lease_duration: 6 } }, { extra: { kv_lease_duration: 60 } }),
  },

  "p-aborts": {
    about: ["P's request is aborted while D waits. P's answer ends D's request."],
    async play(play) {
      const { p, d } = await play.pair({ stepMs: 50 });
      const decoding = decoded(p, d);
      await play.clock.advance(20);
      const computing = started(p.prefill(legs(1).prefill));
      await play.clock.advance(60);
      p.abort(legs(1).prefill.requestId);
      await play.outcome(computing);
      await play.outcome(decoding);
    },
  },

  "write-fails": {
    about: [
      "The WRITE fails. P tells D when nothing touches D's blocks any more. Both free their blocks.",
    ],
    faults: [{ fault: "fail", operation: "WRITE", times: 1 }],
    play: prefillFirst(),
  },

  "p-restarts": {
    about: [
      "P is killed while D waits for it, and starts again under the same engine id.",
      "D's next heartbeat is not delivered. The lease query shows the new process: no WRITE of the dead one can come.",
    ],
    afterMs: 2000,
    async play(play) {
      const { p, d } = await play.pair();
      const decoding = decoded(p, d);
      await play.clock.advance(100);
      await play.kill(p);
      await play.engine("p");
      await play.outcome(decoding);
    },
  },

  "p-dies": {
    about: [
      "P is killed while D waits for it, and does not return. After two heartbeats without an answer the request fails.",
      "A P that is only cut off may still WRITE, so D keeps the blocks for decoder_kv_blocks_ttl, 4 s.",
    ],
    afterMs: 5000,
    async play(play) {
      const { p, d } = await play.pair({}, { extra: { decoder_kv_blocks_ttl: 4 } });
      const decoding = decoded(p, d);
      await play.clock.advance(100);
      await play.kill(p);
      await play.outcome(decoding);
    },
  },

  "d-restarts": {
    about: [
      "D is killed after its registration, and starts again under the same engine id.",
      "P's handshake shows the new process, whose blocks are not those of the registration: P WRITEs nothing.",
    ],
    async play(play) {
      const { p, d } = await play.pair();
      started(decoded(p, d));
      await play.clock.advance(20);
      await play.kill(d);
      await play.engine("d");
      await prefilled(play, p);
    },
  },

  "registration-not-sent": {
    about: [
      "The transport does not take the registration. P does not know D's blocks, so D has them back at once.",
    ],
    faults: [{ fault: "fail", operation: "NOTIFY", from: "d", times: 1 }],
    afterMs: 30_050,
    play: prefillFirst(),
  },

  "p-falls-silent": {
    about: [
      "The link to P is cut. D's request ends at its deadline, push_registration_timeout, 2 s.",
      "P may still WRITE, so D keeps the blocks and repeats the withdrawal until P answers.",
    ],
    afterMs: 3000,
    async play(play) {
      const { p, d } = await play.pair({}, { extra: { push_registration_timeout: 2 } });
      const decoding = decoded(p, d);
      await play.clock.advance(100);
      play.network.disconnect("p", "d", { forMs: 3500 });
      await play.outcome(decoding);
    },
  },

  "registration-times-out": {
    about: [
      "The prompt does not come to P within its push_registration_timeout, 2 s. P refuses the registration.",
    ],
    async play(play) {
      const { p, d } = await play.pair({ extra: { push_registration_timeout: 2 } });
      await play.outcome(decoded(p, d));
    },
  },

  "lease-expires-before-d": {
    about: ["D comes after P's lease has ended. P refuses the registration."],
    async play(play) {
      const { p, d } = await play.pair();
      const params = await prefilled(play, p);
      await play.clock.advance(30_050);
      await play.outcome(decoded(p, d, 1, params));
    },
  },

  "prompt-mismatch": {
    about: [
      "D's request has other tokens than the prompt that P computed. P refuses the registration.",
    ],
    afterMs: 31_000,
    async play(play) {
      const { p, d } = await play.pair();
      const params = await prefilled(play, p);
      await play.outcome(d.decode({ ...legs(1).decode, prompt: 9, params }));
    },
  },

  "reused-reference": {
    about: [
      "Two requests get the same kv_transfer_params. P WRITEs into the blocks of one request, so D refuses the second.",
      "Another D does not know of the first one: P refuses its registration.",
    ],
    async play(play) {
      const [p, d, e] = [await play.engine("p"), await play.engine("d"), await play.engine("e")];
      const params = await prefilled(play, p);
      const first = decoded(p, d, 1, params);
      await play.outcome(d.decode({ ...legs(1).decode, requestId: "r1-eeeeeeee", params }));
      await play.outcome(first);
      await play.clock.advance(10);
      await play.outcome(decoded(p, e, 1, params));
    },
  },

  "vllm-p": {
    about: [
      "P speaks vLLM's protocol without our extensions: a plain PUSH_REG, and the done notification comes with the WRITE.",
    ],
    play: prefillFirst({ plain: true }),
  },
});
