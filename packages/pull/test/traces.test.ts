import { fileURLToPath } from "node:url";
import { prompt, started } from "@kv/testing/scenarios/scenario";
import type { EngineRequest, SimEngineOptions } from "@kv/testing/simulator/sim-options";
import { type TracePlay, traceTests } from "@kv/testing/traces/trace-tests";
import { pullConnector } from "../src/index.js";

/** D's requests for the first prompt: vLLM's ids of `n: 2`. */
const copy = (n: number) => ({ ...prompt(1), requestId: `${n}_r1` });

/** `bidirectional_kv_xfer`, which P and D need. */
const ON = { extra: { bidirectional_kv_xfer: true, kv_recompute_threshold: 16 } };

/** P and D after a first turn of 40 tokens and 21 of output, and D's parameters. */
async function firstTurn(play: TracePlay, decode: Partial<SimEngineOptions> = {}) {
  const { p, d } = await play.pair(ON, { ...ON, ...decode });
  const params = await play.prefilled(p, 1);
  const turn = d.decode({ ...prompt(1), outputTokens: 21, params });
  return { p, d, params: await play.clock.settle(turn) };
}

/** P's request of the second turn. */
const SECOND = { ...prompt(1, 80), requestId: "t2" };

/** P prefills a prompt, then D gets it. */
const handedOver =
  (
    ofP: Partial<SimEngineOptions> = {},
    ofD: Partial<SimEngineOptions> = {},
    change: Partial<EngineRequest> = {},
  ) =>
  async (play: TracePlay) => {
    const { p, d } = await play.pair(ofP, ofD);
    await play.handedOver(p, d, 1, change);
  };

const secondTurn =
  (change: Partial<EngineRequest> = {}, ofD: Partial<SimEngineOptions> = {}) =>
  async (play: TracePlay) => {
    const { p, params } = await firstTurn(play, ofD);
    await play.outcome(p.prefill({ ...SECOND, params, ...change }));
  };

traceTests(fileURLToPath(new URL("./traces", import.meta.url)), pullConnector, {
  "full-fetch": {
    about: ["D has nothing of the prompt and READs all of its blocks."],
    play: handedOver(),
  },

  "partial-prefix-hit": {
    about: ["D's prefix cache has the first block of the prompt. D READs the others."],
    play: handedOver({}, {}, { cachedTokens: 16 }),
  },

  "full-prefix-hit": {
    about: [
      "D's prefix cache has the whole prompt. D READs nothing, and tells P that it may free the blocks.",
    ],
    play: handedOver({}, {}, { cachedTokens: 40 }),
  },

  "tp-2-to-1": {
    about: [
      "P has two ranks, D has one. D READs its heads from both, and both wait for D's one rank.",
    ],
    play: handedOver({ tpSize: 2 }),
  },

  "tp-1-to-2": {
    about: ["P has one rank, D has two. P's rank waits for both: each says that there are two."],
    play: handedOver({}, { tpSize: 2 }),
  },

  "two-readers": {
    about: [
      "A completion with n: 2. Two requests of D get the same kv_transfer_params, and both READ P's blocks.",
      "P is told when the last one is done. A third request comes later and is refused.",
    ],
    faults: [{ fault: "delay", operation: "READ", nth: 2, delayMs: 50 }],
    afterMs: 0,
    async play(play) {
      const { p, d } = await play.pair();
      const params = await play.prefilled(p, 1);
      const both = [0, 1].map((n) => d.decode({ ...copy(n), params }));
      await play.outcome(Promise.all(both));
      await play.clock.advance(50);
      await play.outcome(d.decode({ ...copy(2), params }));
    },
  },

  "waits-for-blocks": {
    about: [
      "D has blocks for one request. The second one waits in D's queue for longer than P's lease of 6 s.",
      "Heartbeats extend the lease by 4 s each. The first READ hangs, and ends at request_timeout, 7 s.",
    ],
    faults: [{ fault: "drop", operation: "READ", times: 1 }],
    async play(play) {
      const { p, d } = await play.pair(
        { extra: { kv_lease_duration: 6 } },
        {
          numBlocks: 3,
          extra: { kv_lease_duration: 6, request_timeout: 7 },
        },
      );
      const first = await play.prefilled(p, 1);
      const second = await play.prefilled(p, 2);
      started(d.decode({ ...prompt(1), params: first }));
      await play.clock.advance(10);
      await play.decoded(d, second, 2);
    },
  },

  "done-before-lease": {
    about: [
      "P's steps take 50 ms. D has READ the blocks before P's next step, which would begin the lease.",
      "P's worker remembers that, and reports the request in that step.",
    ],
    play: handedOver({ stepMs: 50 }),
  },

  "abort-while-reading": {
    about: [
      "The client leaves while D READs. D keeps its blocks until the transport no longer writes into them,",
      "and then tells P.",
    ],
    faults: [{ fault: "delay", operation: "READ", delayMs: 200 }],
    async play(play) {
      const { p, d } = await play.pair();
      const params = await play.prefilled(p, 1);
      const decoding = started(d.decode({ ...prompt(1), params }));
      await play.clock.advance(100);
      d.abort("r1");
      await play.outcome(decoding);
    },
  },

  "lease-expires-before-d": {
    about: [
      "D comes after P's lease has ended, and another prompt has the blocks by now.",
      "The READ succeeds, as one-sided READs do. P's answer to the lease query tells D not to use the bytes.",
    ],
    async play(play) {
      const { p, d } = await play.pair({ numBlocks: 3 });
      const params = await play.prefilled(p, 1);
      await play.clock.advance(30_050);
      await play.prefilled(p, 2);
      await play.decoded(d, params);
    },
  },

  "p-restarts": {
    about: [
      "P is killed while it keeps the blocks of r2, and starts again under the same engine id.",
      "D knows the dead process: its READ fails. The next request of the new process makes D shake hands again.",
    ],
    async play(play) {
      const { p, d } = await play.pair();
      const [first, lost] = [await play.prefilled(p, 1), await play.prefilled(p, 2)];
      await play.decoded(d, first);
      await play.kill(p);
      const again = await play.engine("p");
      await play.decoded(d, lost, 2);
      const params = await play.prefilled(again, 3);
      await play.decoded(d, params, 3);
    },
  },

  "p-restarts-before-handshake": {
    about: [
      "P is killed before D has met it, and starts again under the same engine id. The handshake shows it.",
    ],
    async play(play) {
      const { p, d } = await play.pair();
      const params = await play.prefilled(p, 1);
      await play.kill(p);
      await play.engine("p");
      await play.decoded(d, params);
    },
  },

  "p-unreachable": {
    about: [
      "P is killed, and nobody answers at its address. The next request to it fails without a try.",
    ],
    async play(play) {
      const { p, d } = await play.pair();
      const [first, second] = [await play.prefilled(p, 1), await play.prefilled(p, 2)];
      await play.kill(p);
      await play.decoded(d, first);
      await play.decoded(d, second, 2);
    },
  },

  "prompt-mismatch": {
    about: [
      "D's request has other tokens than the prompt that P computed. P's answer to the lease query says so.",
    ],
    play: handedOver({}, {}, { prompt: 9 }),
  },

  "parameters-invalid": {
    about: [
      "kv_transfer_params have blocks of two groups, D's cache has one. D refuses them, and has P free its blocks.",
    ],
    async play(play) {
      const { p, d } = await play.pair();
      const params = { ...(await play.prefilled(p, 1)), remote_block_ids: [[0, 1, 2], [3]] };
      await play.decoded(d, params);
    },
  },

  incompatible: {
    about: [
      "P serves another model. D compares the hashes of the handshake, READs nothing, and has P free its blocks.",
    ],
    play: handedOver({ model: "another" }),
  },

  "abort-while-queued": {
    about: ["The client leaves before D has blocks for the request. D has P free its blocks."],
    async play(play) {
      const { p, d } = await play.pair({}, { numBlocks: 2 });
      const params = await play.prefilled(p, 1);
      const decoding = started(d.decode({ ...prompt(1), params }));
      await play.clock.advance(20);
      d.abort("r1");
      await play.outcome(decoding);
    },
  },

  "d-dies": {
    about: ["D is killed while it READs. No heartbeat comes any more, and P's lease expires."],
    faults: [{ fault: "delay", operation: "READ", delayMs: 200 }],
    afterMs: 30_000,
    async play(play) {
      const { p, d } = await play.pair();
      const params = await play.prefilled(p, 1);
      started(d.decode({ ...prompt(1), params }));
      await play.clock.advance(100);
      await play.kill(d);
    },
  },

  "read-fails": {
    about: [
      "A READ fails. Under kv_load_failure_policy recompute, D computes the prompt itself.",
      "D tells P in any case, so P frees its blocks.",
    ],
    faults: [{ fault: "fail", operation: "READ", times: 1 }],
    play: handedOver({}, { loadFailurePolicy: "recompute" }),
  },

  "vllm-p": {
    about: [
      "P speaks vLLM's protocol without our extensions. It answers no lease query, so D goes by its clock:",
      "a READ that ends later than 5 s before the end of the lease is not used.",
    ],
    faults: [{ fault: "delay", operation: "READ", nth: 2, delayMs: 26_000 }],
    async play(play) {
      const p = await play.engine("p", { plain: true });
      // Without heartbeats in time, as from a D that is stopped for a while.
      const d = await play.engine("d", { extra: { kv_lease_duration: 240 } });
      const [first, second] = [await play.prefilled(p, 1), await play.prefilled(p, 2)];
      await play.decoded(d, first);
      await play.decoded(d, second, 2);
    },
  },

  readback: {
    about: [
      "bidirectional_kv_xfer: D keeps the blocks of a finished request, 40 tokens and 20 of its output, for",
      "decoder_kv_blocks_ttl. The next turn's prompt of 80 tokens goes on from them: P READs 60 and computes 20.",
    ],
    afterMs: 30_000,
    async play(play) {
      const { p, params } = await firstTurn(play);
      await play.outcome(p.prefill({ ...SECOND, params }));
      await play.clock.advance(50);
    },
  },

  "readback-below-threshold": {
    about: [
      "P has 48 of D's 60 tokens. 12 are fewer than kv_recompute_threshold: P computes them, and tells D.",
    ],
    afterMs: 30_050,
    play: secondTurn({ cachedTokens: 48 }),
  },

  "readback-prompt-mismatch": {
    about: [
      "The next prompt differs from the conversation in one token of the output. D's answer to P's query says so.",
    ],
    play: secondTurn({ changedToken: 50 }),
  },

  "readback-shorter-prompt": {
    about: [
      "The next prompt is shorter than what D keeps: the last answer is made anew. P refuses, and tells D.",
    ],
    play: secondTurn({ numTokens: 40 }),
  },

  "readback-used-twice": {
    about: [
      "Two P's get the same parameters, one after the other. D does not hold the blocks for the second one.",
    ],
    afterMs: 30_050,
    async play(play) {
      const { p, params } = await firstTurn(play);
      await play.outcome(p.prefill({ ...SECOND, params }));
      const q = await play.engine("q", ON);
      await play.outcome(q.prefill({ ...SECOND, requestId: "t3", params }));
    },
  },

  "readback-expired": {
    about: [
      "Nobody reads the blocks within decoder_kv_blocks_ttl, 10 s, and D frees them. P comes later.",
    ],
    async play(play) {
      const { p, params } = await firstTurn(play, {
        extra: { ...ON.extra, decoder_kv_blocks_ttl: 10 },
      });
      await play.clock.advance(10_050);
      await play.outcome(p.prefill({ ...SECOND, params }));
    },
  },

  "readback-d-restarts": {
    about: ["D is killed while it keeps the blocks, and starts again under the same engine id."],
    async play(play) {
      const { p, d, params } = await firstTurn(play);
      await play.kill(d);
      await play.engine("d", ON);
      await play.outcome(p.prefill({ ...SECOND, params }));
    },
  },

  "readback-read-fails": {
    about: [
      "P's READ fails. Under kv_load_failure_policy recompute, P computes the prompt itself, and tells D.",
    ],
    afterMs: 30_050,
    async play(play) {
      const { params } = await firstTurn(play);
      const q = await play.engine("q", { ...ON, loadFailurePolicy: "recompute" });
      play.network.setFaults([{ fault: "fail", operation: "READ", times: 1 }]);
      await play.outcome(q.prefill({ ...SECOND, params }));
    },
  },

  "readback-vllm-d": {
    about: [
      "D speaks vLLM's protocol without our extensions. It answers no lease query: nobody compares the prompts.",
    ],
    afterMs: 30_050,
    play: secondTurn({}, { plain: true }),
  },

  "readback-vllm-d-late": {
    about: ["The same, 5 s before the end of decoder_kv_blocks_ttl, 20 s: P reads nothing."],
    async play(play) {
      const vllm = { plain: true, extra: { ...ON.extra, decoder_kv_blocks_ttl: 20 } };
      const { p, params } = await firstTurn(play, vllm);
      await play.clock.advance(15_050);
      await play.outcome(p.prefill({ ...SECOND, params }));
    },
  },
});
