import { type Clock, KvError, type Log, type SideChannel, type SideChannelListener } from "@kv/interface";
import {
  decodeHandshakeRequest,
  decodeLeaseQuery,
  encodeHandshakeRefusal,
  encodeHandshakeReply,
  encodeLeaseReply,
  type LeaseQuery,
  type LeaseReply,
  sealHandshake,
} from "@kv/protocol";
import { type RankKey, rankKey } from "./rank-key.js";

/**
 * Serves the handshake payloads of an engine's ranks, as vLLM's `_nixl_handshake_listener` does, in the process whose clock the
 * leases are stamped with. Unlike vLLM's it outlives whatever it is sent: what is no request gets no answer, a rank that does not
 * exist gets one that says so, which a vLLM client takes for a failed handshake at once instead of after its timeout.
 */
export interface HandshakeListener {
  /** Where peers are sent to: of the first port. */
  readonly host: string;
  readonly port: number;
  /** Serves these payloads from now on, by rank. */
  publish(payloads: readonly RankPayload[]): void;
  /** How often a rank's payload was published new or changed: `remote_registration_generation`. */
  readonly registrationGeneration: number;
  readonly listeners: number;
  close(): Promise<void>;
}

export interface RankPayload {
  readonly tpRank: number;
  readonly ppRank: number;
  /** Encoded `HandshakePayload`. */
  readonly payload: Uint8Array;
}

export interface HandshakeListenerOptions {
  readonly sideChannel: SideChannel;
  readonly clock: Clock;
  readonly log: Log;
  readonly host: string;
  /** One port for all ranks today; one per rank in vLLM's guide (port + dp_rank · tp_size + tp_rank). Each serves every rank. */
  readonly ports: readonly number[];
  /** What is served from the first moment on: an open port without a payload would turn the first peers away. */
  readonly payloads: readonly RankPayload[];
  /** Signs what is served, for peers that have the same key; the others can still read it. */
  readonly key?: Uint8Array;
  /** Answers our own peers' question about a lease; nothing when absent. */
  lease?(question: LeaseQuery): LeaseReply;
}

/** Opens all ports, or none. Errors: `KV_SIDE_CHANNEL_BIND_FAILED`. */
export async function openHandshakeListener(options: HandshakeListenerOptions): Promise<HandshakeListener> {
  const { sideChannel, clock, log, host, ports } = options;
  const payloads = new Map<RankKey, { readonly given: Uint8Array; readonly sealed: Uint8Array }>();
  let registrationGeneration = 0;

  function answer(frames: readonly Uint8Array[]): readonly Uint8Array[] | undefined {
    const question = decodeLeaseQuery(frames);
    if (question !== undefined) {
      return options.lease === undefined ? undefined : [encodeLeaseReply(options.lease(question))];
    }
    try {
      const { ppRank, tpRank } = decodeHandshakeRequest(frames);
      const payload = payloads.get(rankKey({ ppRank, tpRank }));
      if (payload !== undefined) return encodeHandshakeReply(payload.sealed, clock.now() / 1000);
      log.warn("handshake-for-unknown-rank", { ppRank, tpRank, known: [...payloads.keys()] });
      return [
        encodeHandshakeRefusal(
          `this engine has no rank (pp ${ppRank}, tp ${tpRank}); it has ${[...payloads.keys()].join(", ") || "none yet"}`,
        ),
      ];
    } catch (error) {
      if (!KvError.is(error)) throw error;
      log.warn("handshake-request-refused", { code: error.code, error: error.message });
      return undefined;
    }
  }

  function publish(ranks: readonly RankPayload[]): void {
    for (const { ppRank, tpRank, payload } of ranks) {
      const key = rankKey({ ppRank, tpRank });
      const before = payloads.get(key);
      // Peers that shook hands before hold what is not true any more: the number in `kv_transfer_params` tells them.
      if (before === undefined || !sameBytes(before.given, payload)) registrationGeneration += 1;
      payloads.set(key, {
        given: payload.slice(),
        sealed: sealHandshake(payload, { ppRank, tpRank }, options.key),
      });
    }
  }

  publish(options.payloads);
  const opened: SideChannelListener[] = [];
  try {
    for (const port of ports) opened.push(await sideChannel.listen({ host, port, answer }));
  } catch (error) {
    await Promise.all(opened.map((listener) => listener.close()));
    throw error;
  }
  const [first] = opened;
  if (first === undefined)
    throw new KvError("KV_SIDE_CHANNEL_BIND_FAILED", `no port to listen on at ${host}`);

  return {
    host: first.host,
    port: first.port,
    publish,
    get registrationGeneration() {
      return registrationGeneration;
    },
    get listeners() {
      return opened.length;
    },
    async close() {
      await Promise.all(opened.splice(0).map((listener) => listener.close()));
    },
  };
}

function sameBytes(a: Uint8Array, b: Uint8Array): boolean {
  return a.byteLength === b.byteLength && a.every((byte, index) => byte === b[index]);
}
