import { type Clock, KvError, type Log, type SideChannel, type SideChannelListener } from "@kv/interface";
import {
  decodeHandshakePayload,
  decodeHandshakeRequest,
  decodeLeaseQuery,
  encodeHandshakePayload,
  encodeHandshakeRefusal,
  encodeHandshakeReply,
  encodeLeaseReply,
  type HandshakeRequest,
  type LeaseQuery,
  type LeaseReply,
  sealHandshake,
} from "@kv/protocol";
import { LimitedWarnings } from "@kv/side-channel";
import { type RankKey, rankKey } from "../peers/engine-address.js";

/** The handshake payload of one rank. */
export interface RankPayload {
  /** Tensor-parallel rank. */
  readonly tpRank: number;
  /** Pipeline-parallel rank. */
  readonly ppRank: number;
  /** An encoded `HandshakePayload`. */
  readonly payload: Uint8Array;
}

/** Options of `openHandshakeListener`. */
export interface HandshakeListenerOptions {
  readonly sideChannel: SideChannel;
  /** The clock that leases are stamped with; replies carry it. */
  readonly clock: Clock;
  readonly log: Log;
  /** Address to bind. */
  readonly host: string;
  /** One port for all ranks; or one per rank as in vLLM's older guide (port + dp_rank · tp_size + tp_rank). Each serves every rank. */
  readonly ports: readonly number[];
  /** Payloads that are served from the start: an open port without payloads would refuse the first peers. */
  readonly payloads: readonly RankPayload[];
  /** Answers lease queries of `@kv` peers; they get no reply when absent. */
  lease?(query: LeaseQuery): LeaseReply;
}

/** Opens all ports, or none. Errors: `KV_SIDE_CHANNEL_BIND_FAILED`; those of `decodeHandshakePayload`. */
export async function openHandshakeListener(options: HandshakeListenerOptions): Promise<HandshakeListener> {
  const { sideChannel, host, ports } = options;
  const payloads = new ServedPayloads();
  payloads.publish(options.payloads);
  const warnings = new LimitedWarnings(options.clock, options.log);
  const answer = (frames: readonly Uint8Array[]) => answerRequest(frames, payloads, options, warnings);
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
  return new HandshakeListener(first.host, first.port, opened, payloads);
}

/**
 * Serves the handshake payloads of an engine's ranks (vLLM: `_nixl_handshake_listener`), in the process whose clock the leases are stamped
 * with. Unlike vLLM's, it keeps serving after malformed input: a malformed request gets no reply, and a rank that does not exist gets a
 * refusal, which a vLLM client treats as a failed handshake at once instead of after its timeout.
 */
export class HandshakeListener implements AsyncDisposable {
  /** Address of the first port; peers are sent here. */
  readonly host: string;
  /** The first port. */
  readonly port: number;
  readonly #listeners: SideChannelListener[];
  readonly #payloads: ServedPayloads;

  /** Use `openHandshakeListener`. */
  constructor(host: string, port: number, listeners: SideChannelListener[], payloads: ServedPayloads) {
    this.host = host;
    this.port = port;
    this.#listeners = listeners;
    this.#payloads = payloads;
  }

  /** Serves these payloads from now on, by rank. Errors: those of `decodeHandshakePayload`. */
  publish(payloads: readonly RankPayload[]): void {
    this.#payloads.publish(payloads);
  }

  /** How often a new or changed payload of a rank was published: `remote_registration_generation` of `kv_transfer_params`. */
  get registrationGeneration(): number {
    return this.#payloads.generation;
  }

  /** Number of open ports. */
  get listeners(): number {
    return this.#listeners.length;
  }

  /** Closes all ports. Safe to call twice. */
  async close(): Promise<void> {
    await Promise.all(this.#listeners.splice(0).map((listener) => listener.close()));
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }
}

interface ServedPayload {
  readonly rank: HandshakeRequest;
  readonly published: Uint8Array;
  /** Made at the first request, and again when the generation has changed. */
  sealed?: { readonly bytes: Uint8Array; readonly generation: number };
}

/** The payloads by rank, as published and sealed. */
class ServedPayloads {
  readonly #payloads = new Map<RankKey, ServedPayload>();
  generation = 0;

  publish(ranks: readonly RankPayload[]): void {
    for (const { ppRank, tpRank, payload } of ranks) {
      const key = rankKey({ ppRank, tpRank });
      const before = this.#payloads.get(key);
      // Peers with an older handshake hold stale metadata: the generation in `kv_transfer_params` makes them shake hands again.
      if (before !== undefined && sameBytes(before.published, payload)) continue;
      decodeHandshakePayload(payload);
      this.generation += 1;
      this.#payloads.set(key, { rank: { ppRank, tpRank }, published: payload.slice() });
    }
  }

  /** The rank's payload with the generation of all payloads. Undefined for an unknown rank. */
  sealed(rank: RankKey): Uint8Array | undefined {
    const payload = this.#payloads.get(rank);
    if (payload === undefined) return undefined;
    const { generation } = this;
    const { sealed } = payload;
    if (sealed !== undefined && sealed.generation === generation) return sealed.bytes;
    const decoded = decodeHandshakePayload(payload.published);
    const extension = { ...decoded.extension, registration_generation: generation };
    const bytes = sealHandshake(encodeHandshakePayload({ ...decoded, extension }), payload.rank);
    payload.sealed = { bytes, generation };
    return bytes;
  }

  get ranks(): readonly RankKey[] {
    return [...this.#payloads.keys()];
  }
}

/** The reply to a request on the side channel; undefined for none. */
function answerRequest(
  frames: readonly Uint8Array[],
  payloads: ServedPayloads,
  { clock, lease }: HandshakeListenerOptions,
  warnings: LimitedWarnings,
): readonly Uint8Array[] | undefined {
  const query = decodeLeaseQuery(frames);
  if (query !== undefined) return lease === undefined ? undefined : [encodeLeaseReply(lease(query))];
  try {
    const { ppRank, tpRank } = decodeHandshakeRequest(frames);
    const payload = payloads.sealed(rankKey({ ppRank, tpRank }));
    if (payload !== undefined) return encodeHandshakeReply(payload, clock.now() / 1000);
    warnings.warn("handshake-for-unknown-rank", "rank", { ppRank, tpRank, known: payloads.ranks });
    const known = payloads.ranks.join(", ") || "none yet";
    return [encodeHandshakeRefusal(`this engine has no rank (pp ${ppRank}, tp ${tpRank}); it has ${known}`)];
  } catch (error) {
    if (!KvError.is(error)) throw error;
    warnings.warn("handshake-request-refused", error.code, { code: error.code, error: error.message });
    return undefined;
  }
}

function sameBytes(a: Uint8Array, b: Uint8Array): boolean {
  return a.byteLength === b.byteLength && a.every((byte, index) => byte === b[index]);
}
