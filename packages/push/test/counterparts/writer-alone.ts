import type { LeaseOrder } from "@kv/connector/building-blocks";
import { descriptorPairs, type Transfer, type TransferRequest } from "@kv/interface";
import {
  decodeNotification,
  decodeRegistration,
  encodePrompt,
  PUSH_CONTROL,
  promptDigest,
  type Registration,
} from "@kv/protocol";
import { manualClock } from "@kv/testing/manual-clock";
import { leavesNothing } from "@kv/testing/nothing-left";
import { listAgent, testContext, testRank, testRanks } from "@kv/testing/worker-context";
import { PrefillWorker } from "../../src/prefill-worker.js";

/** The prompt of every request. */
const PROMPT = { tokenIds: new Int32Array(40) };
/** A push writer over an agent that records WRITEs and notifications; every WRITE ends at once. */
export function writerOn() {
  const clock = manualClock(500);
  /** Each WRITE as "producer's request → consumer's request [the consumer's blocks]". */
  const written: string[] = [];
  /** The first four characters of each notification that was sent without a WRITE. */
  const notified: string[] = [];
  /** The producer's requests by their first block. */
  const requestOfBlock = new Map<number, string>();
  const agent = listAgent({
    async notify(_remote: string, payload: Uint8Array) {
      notified.push(new TextDecoder().decode(payload).slice(0, 4));
    },
    transfer(request: TransferRequest) {
      const { localIds, remoteIds } = descriptorPairs(request);
      const done = decodeNotification(request.notification ?? new Uint8Array());
      const consumerRequest =
        done.kind === "extension" ? done.message.request_id : "requestId" in done && done.requestId;
      written.push(`${requestOfBlock.get(localIds[0] ?? -1)} → ${consumerRequest} [${remoteIds}]`);
      return { done: Promise.resolve({}), released: Promise.resolve() } as unknown as Transfer;
    },
  });
  const context = testContext({
    agent,
    clock,
    incarnation: "d-process",
    features: [PUSH_CONTROL],
    model: { numKvHeads: 1, groups: ["full"] },
    local: testRank({}, 1),
    remote: testRanks(() => testRank({}, 1)),
    extra: { engine_ttl: 0, request_timeout: 1, push_registration_timeout: 5 },
  });
  const { output } = context;
  const writer = new PrefillWorker(context);
  const none = {
    schedulerClockMs: 500,
    incarnation: "p-process",
    inBatch: [],
    notSent: [],
    leases: [],
  };
  let generation = 0;
  /** A finished request with three blocks of its own. */
  const order = (requestId: string): LeaseOrder => {
    const first = generation * 3;
    generation += 1;
    requestOfBlock.set(first, requestId);
    const blocks = [[first, first + 1, first + 2]];
    return {
      requestId,
      wireId: requestId,
      generation,
      blockIds: blocks,
      promptBlockIds: blocks,
      numTokens: 40,
      prompt: encodePrompt(PROMPT),
      expiresAtMs: 500 + 30_000,
    };
  };
  const idle = async () => {
    for (let i = 0; i < 100; i++) await Promise.resolve();
  };
  leavesNothing(
    () => ({ ...writer.outstanding(), timers: clock.pending() }),
    async () => {
      clock.advance(1_000_000);
      await idle();
    },
  );
  return {
    clock,
    writer,
    written,
    notified,
    idle,
    output,
    none,
    order,
    finish: (...ids: string[]) => writer.step({ ...none, leases: ids.map(order) }),
    register: (id: string, change: object = {}) =>
      writer.register(registrationOf(id, change), "d agent"),
  };
}

export const REGISTRATION = {
  decode_engine_id: "d",
  decode_host: "d",
  decode_port: 5600,
  decode_tp_size: 1,
  local_block_ids: [[7, 8, 9]],
  remote_engine_id: "p",
  remote_host: "p",
  remote_port: 5600,
  remote_tp_size: 1,
};
export const registrationOf = (request_id: string, change: object = {}): Registration =>
  decodeRegistration({ ...REGISTRATION, request_id, ...change });

export const OWN = {
  match_id: "r",
  rank: 0,
  incarnation: "d-process",
  secret: "s".repeat(22),
  generation: 1,
  oldest_open: 1,
  num_tokens: 40,
  prompt_digest: promptDigest(PROMPT, 40),
  computed_blocks: [0],
};

export const withdrawal = (request_id: string): Registration =>
  decodeRegistration(
    { ...REGISTRATION, request_id, local_block_ids: [], kv_peer: { ...OWN, match_id: request_id } },
    true,
  );
