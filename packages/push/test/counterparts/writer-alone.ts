import { createMessages, createOutbox, createPeers, type LeaseOrder } from "@kv/connector";
import { type Agent, silentLog } from "@kv/interface";
import { fixedClock } from "../../../pull/test/fixed-clock.js";
import { decodeRegistration, type Offer } from "../../src/control.js";
import type { WriteLink } from "../../src/prefill/consumer-link.js";
import { createPushWriter } from "../../src/prefill/push-writer.js";

const BLOCKS = [[4, 5, 6]];

/** A writer whose WRITEs are noted and end at once, and what it tells its readers. */
export function writerOn() {
  const clock = fixedClock(500);
  const outbox = createOutbox();
  const written: string[] = [];
  const told: string[] = [];
  const agent = {
    async notify(_remote: string, payload: Uint8Array) {
      told.push(new TextDecoder().decode(payload).slice(0, 4));
    },
  } as unknown as Agent;
  const nothing = () => {};
  const writer = createPushWriter({
    clock,
    log: silentLog,
    metrics: {
      transferred: nothing,
      transferFailed: nothing,
      handshakeFailed: nothing,
      notificationFailed: nothing,
      leaseExpired: nothing,
      notificationAfterExpiry: nothing,
    },
    outbox,
    messages: createMessages({ agent, log: silentLog }),
    peers: createPeers<WriteLink>({
      clock,
      log: silentLog,
      engineTtlMs: 0,
      open: async (address) => ({
        address,
        incarnation: "d-process",
        controls: true,
        targets: new Map([[0, { agent: "d agent", plan: undefined as never, lists: [] }]]),
      }),
      close: async () => {},
    }),
    engineId: "p",
    tpRank: 0,
    tpSize: 1,
    extensionMs: 20_000,
    writeTimeoutMs: 1000,
    offerMs: 5000,
    rememberMs: 60_000,
    async write(_link, ranks, { order, offer }) {
      written.push(`${order.requestId} → ${offer.wireId} [${offer.blockIds}] ranks ${ranks}`);
    },
  });
  const none = { schedulerClockMs: 500, incarnation: "p-process", inBatch: [], notSent: [], leases: [] };
  let generation = 0;
  const order = (requestId: string): LeaseOrder => {
    generation += 1;
    return {
      requestId,
      wireId: requestId,
      generation,
      blockIds: BLOCKS,
      promptBlockIds: BLOCKS,
      numTokens: 40,
      expiresAtMs: 500 + 30_000,
    };
  };
  const idle = async () => {
    for (let i = 0; i < 20; i++) await Promise.resolve();
  };
  return {
    clock,
    writer,
    written,
    told,
    idle,
    outbox,
    none,
    order,
    finish: (...ids: string[]) => writer.step({ ...none, leases: ids.map(order) }),
    register: (id: string, change: object = {}) => writer.offer(offerOf(id, change), "d agent"),
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
export const offerOf = (request_id: string, change: object = {}): Offer =>
  decodeRegistration({ ...REGISTRATION, request_id, ...change });

export const OWN = {
  match_id: "r",
  rank: 0,
  incarnation: "d-process",
  generation: 1,
  oldest_open: 1,
  num_tokens: 40,
  computed_blocks: [0],
};

export const withdrawal = (request_id: string): Offer =>
  decodeRegistration(
    { ...REGISTRATION, request_id, local_block_ids: [], kv_peer: { ...OWN, match_id: request_id } },
    true,
  );
