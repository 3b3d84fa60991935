import { createHash } from "node:crypto";
import { KvError, type SideChannel, type SideChannelReply } from "@kv/interface";
import {
  type AgentMetadata,
  type CompatibilityExplanation,
  checkHandshakeSeal,
  decodeAgentMetadata,
  decodeHandshakeRefusal,
  decodeHandshakeReply,
  encodeHandshakeRequest,
  encodeMsgpack,
  explainCompatibility,
  type HandshakeExtension,
  type HandshakePayload,
} from "@kv/protocol";
import { describeEngine, type EngineAddress } from "../requests/remote-request.js";

/**
 * Bytes of the answers of all ranks together: a hundred times what 256 ranks send over UCX. A
 * request names the engine, so one must not be able to ask for more.
 */
const MAX_ANSWER_BYTES = 64 * 2 ** 20;
/** For the answers of all ranks, in milliseconds. */
const MAX_ANSWERING_MS = 60_000;

/** The metadata of a remote engine's ranks, decoded and checked. */
export interface Handshake {
  readonly ranks: readonly HandshakeRank[];
  readonly clock: ClockOffset;
  /** The `@kv` extension; undefined for vLLM. */
  readonly extension: HandshakeExtension | undefined;
  /**
   * SHA-256 of what was received: equal for two handshakes with the same process and the same
   * registered caches.
   */
  readonly fingerprint: string;
}

/** The metadata of one rank. */
export interface HandshakeRank {
  readonly ppRank: number;
  readonly tpRank: number;
  readonly metadata: AgentMetadata;
}

/** Options of `shakeHands`. */
export interface HandshakeClientOptions {
  readonly sideChannel: SideChannel;
  readonly timeoutMs: number;
  readonly compatibility: {
    readonly hash: string;
    readonly factors: Readonly<Record<string, unknown>>;
    readonly enforced: boolean;
    readonly relaxed?: ((why: CompatibilityExplanation) => void) | undefined;
  };
  /**
   * One port per rank, as in vLLM's older guide: rank r answers at the engine's port + r. Default
   * false.
   */
  readonly portPerRank?: boolean | undefined;
}

/**
 * Asks each rank for its metadata, one after another (vLLM: `_nixl_handshake`). The compatibility
 * hash is checked before the metadata is decoded.
 * @throws The errors of `SideChannel.request`; `KV_HANDSHAKE_REFUSED` when the peer answers with a
 * refusal; `KV_HANDSHAKE_UNTRUSTED` when the payload was changed on its way;
 * `KV_HANDSHAKE_INCOMPATIBLE` naming the factor that differs; `KV_HANDSHAKE_WRONG_ENGINE` when
 * another engine answers; `KV_WIRE_MALFORMED`; `KV_WIRE_LIMIT_EXCEEDED` also where all ranks
 * together send more than 64 MiB, or take longer than a minute.
 */
export async function shakeHands(
  address: EngineAddress,
  tpRanks: readonly number[],
  options: HandshakeClientOptions,
): Promise<Handshake> {
  const samples: ClockSample[] = [];
  const ranks: HandshakeRank[] = [];
  let extension: HandshakeExtension | undefined;
  let relaxed = false;
  const received = createHash("sha256");
  const budget = new AnswerBudget(address);
  for (let ppRank = 0; ppRank < address.ppSize; ppRank++) {
    // One after another, as in vLLM: a listener answers one request at a time, and waiting would
    // distort the clock samples.
    for (const tpRank of tpRanks) {
      const { payload, sample } = await ask(address, ppRank, tpRank, options, budget);
      if (sample !== undefined) samples.push(sample);
      checkHandshakeSeal(payload, { ppRank, tpRank });
      relaxed = checkCompatibility(address, payload, options, relaxed) || relaxed;
      const metadata = decodeAgentMetadata(payload.agentMetadataBytes);
      checkEngine(address, metadata);
      extension = payload.extension;
      const { incarnation, registration_generation: registration } = extension ?? {};
      received.update(
        encodeMsgpack([
          ppRank,
          tpRank,
          payload.agentMetadataBytes,
          String(incarnation),
          String(registration),
        ]),
      );
      ranks.push({ ppRank, tpRank, metadata });
    }
  }
  if (samples.length === 0) {
    throw new KvError(
      "KV_HANDSHAKE_INCOMPATIBLE",
      `${describeEngine(address)} did not send its clock: its connector is older than version 5, this one speaks version 15`,
      { hint: "upgrade the peer to vLLM 0.32 or later" },
    );
  }
  return { ranks, clock: clockOffset(samples), extension, fingerprint: received.digest("hex") };
}

async function ask(
  address: EngineAddress,
  ppRank: number,
  tpRank: number,
  { sideChannel, timeoutMs, portPerRank }: HandshakeClientOptions,
  budget: AnswerBudget,
): Promise<{ payload: HandshakePayload; sample: ClockSample | undefined }> {
  const reply = await sideChannel.request({
    host: address.host,
    port: portPerRank === true ? address.port + tpRank : address.port,
    frames: [encodeHandshakeRequest({ ppRank, tpRank })],
    timeoutMs,
  });
  budget.take(reply);
  const refusal = decodeHandshakeRefusal(reply.frames);
  if (refusal !== undefined) {
    throw new KvError(
      "KV_HANDSHAKE_REFUSED",
      `${describeEngine(address)} refused the handshake: ${refusal}`,
      { hint: "check tp_size and pp_size in kv_transfer_params against the prefill worker's" },
    );
  }
  const { payload, clockSeconds } = decodeHandshakeReply(reply.frames);
  return {
    payload,
    sample:
      clockSeconds === undefined
        ? undefined
        : {
            sentAtMs: reply.sentAtMs,
            receivedAtMs: reply.receivedAtMs,
            remoteSeconds: clockSeconds,
          },
  };
}

/** What the ranks of one engine may send, and how long they may take, together. */
class AnswerBudget {
  readonly #address: EngineAddress;
  #bytes = 0;
  #beganAtMs: number | undefined;

  constructor(address: EngineAddress) {
    this.#address = address;
  }

  /** @throws `KV_WIRE_LIMIT_EXCEEDED`. */
  take({ frames, sentAtMs, receivedAtMs }: SideChannelReply): void {
    this.#bytes += frames.reduce((sum, { byteLength }) => sum + byteLength, 0);
    this.#beganAtMs ??= sentAtMs;
    const tookMs = receivedAtMs - this.#beganAtMs;
    const found =
      this.#bytes > MAX_ANSWER_BYTES
        ? `sent ${this.#bytes} bytes; the limit is ${MAX_ANSWER_BYTES}`
        : `took ${Math.round(tookMs)} ms; the limit is ${MAX_ANSWERING_MS}`;
    if (this.#bytes <= MAX_ANSWER_BYTES && tookMs <= MAX_ANSWERING_MS) return;
    const message = `the ranks of ${describeEngine(this.#address)} together ${found}`;
    throw new KvError("KV_WIRE_LIMIT_EXCEEDED", message, {
      hint: "check tp_size and pp_size in kv_transfer_params against the prefill worker's",
    });
  }
}

/**
 * Returns true when the hashes differ and the difference is accepted. `isReported`: `relaxed` was
 * already called for this engine.
 */
function checkCompatibility(
  address: EngineAddress,
  payload: HandshakePayload,
  { compatibility }: HandshakeClientOptions,
  isReported: boolean,
): boolean {
  if (payload.compatibilityHash === compatibility.hash) return false;
  if (!compatibility.enforced && (isReported || compatibility.relaxed === undefined)) return true;
  const factors = payload.extension?.factors;
  const sent =
    typeof factors === "object" && factors !== null
      ? { factors: factors as Record<string, unknown> }
      : {};
  const why = explainCompatibility(compatibility.factors, {
    hash: payload.compatibilityHash,
    ...sent,
  });
  if (!compatibility.enforced) {
    compatibility.relaxed?.(why);
    return true;
  }
  throw new KvError(
    "KV_HANDSHAKE_INCOMPATIBLE",
    `${describeEngine(address)} cannot be read from: ${why.text}`,
    {
      hint: 'make the two configurations equal, or set "enforce_handshake_compat": false in kv_connector_extra_config to read all the same',
      details: {
        ours: compatibility.hash,
        theirs: payload.compatibilityHash,
        differences: why.differences,
      },
    },
  );
}

function checkEngine(address: EngineAddress, { engineId }: AgentMetadata): void {
  if (engineId === address.engineId) return;
  throw new KvError(
    "KV_HANDSHAKE_WRONG_ENGINE",
    `engine ${engineId} answers at ${address.host}:${address.port}, where engine ${address.engineId} was expected`,
    {
      hint: "the prefill worker was restarted, or two share an address: send the prompt to it again",
      details: { expected: address.engineId, found: engineId },
    },
  );
}

/**
 * One exchange with a peer whose reply has a clock: when the request was sent, when the reply
 * arrived, and the peer's clock in between.
 */
export interface ClockSample {
  readonly sentAtMs: number;
  readonly receivedAtMs: number;
  /**
   * The peer's monotonic clock in seconds (vLLM: `time.perf_counter()` of the scheduler process).
   */
  readonly remoteSeconds: number;
}

/**
 * The estimated offset of a peer's clock. The peer's times are in seconds, as on the wire; local
 * times are in milliseconds.
 */
export interface ClockOffset {
  readonly offsetMs: number;
  /**
   * Round trip of the sample that the estimate uses. The error of the estimate is at most half of
   * it.
   */
  readonly rttMs: number;
  /**
   * Converts a time of the peer to a local time that is never later than the true one, for
   * deadlines.
   */
  earliestLocalMs(remoteSeconds: number): number;
}

/**
 * Estimates a peer's clock from the sample with the lowest round trip, as vLLM 0.33 does, because
 * slower samples are less exact.
 * @throws `KV_WIRE_MALFORMED` without a sample, for a number that is not finite, and for a reply
 * before its request.
 */
export function clockOffset(samples: readonly ClockSample[]): ClockOffset {
  let best: ClockSample | undefined;
  for (const sample of samples) {
    const { sentAtMs, receivedAtMs, remoteSeconds } = sample;
    if (
      ![sentAtMs, receivedAtMs, remoteSeconds].every(Number.isFinite) ||
      receivedAtMs < sentAtMs
    ) {
      throw new KvError(
        "KV_WIRE_MALFORMED",
        `clock sample is not usable: sent ${sentAtMs} ms, received ${receivedAtMs} ms, remote ${remoteSeconds} s`,
      );
    }
    if (best === undefined || rtt(sample) < rtt(best)) best = sample;
  }
  if (best === undefined)
    throw new KvError("KV_WIRE_MALFORMED", "a handshake without a clock sample");
  const { sentAtMs, receivedAtMs, remoteSeconds } = best;
  const offsetMs = remoteSeconds * 1000 - (sentAtMs + receivedAtMs) / 2;
  // The peer read its clock after the request was sent, so remote − local is at most this.
  const greatestOffsetMs = remoteSeconds * 1000 - sentAtMs;
  return {
    offsetMs,
    rttMs: rtt(best),
    earliestLocalMs: (seconds) => seconds * 1000 - greatestOffsetMs,
  };
}

function rtt(sample: ClockSample): number {
  return sample.receivedAtMs - sample.sentAtMs;
}
