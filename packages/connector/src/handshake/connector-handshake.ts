import { createHash } from "node:crypto";
import {
  type KvCacheConfig,
  KvError,
  type Log,
  type SideChannel,
  type SideChannelReply,
  type WorkerOptions,
} from "@kv/interface";
import type { RankGeometry } from "@kv/plan";
import {
  type AgentMetadata,
  type CompatibilityExplanation,
  type CompatibilityFactors,
  checkHandshakeSeal,
  compatibilityHash,
  decodeAgentMetadata,
  decodeHandshakeRefusal,
  decodeHandshakeReply,
  encodeAgentMetadata,
  encodeHandshakePayload,
  encodeHandshakeRequest,
  encodeMsgpack,
  explainCompatibility,
  type HandshakePayload,
} from "@kv/protocol";
import type { ConnectorSettings } from "../config/connector-settings.js";
import {
  describeEngine,
  type EngineAddress,
  type RankKey,
  rankKey,
} from "../requests/references.js";
import { announcedInBlocksOf, describeRank, remoteGeometry } from "./rank-geometry.js";

export interface RemoteRanks {
  /** Empty for an engine that is refused. */
  readonly ranks: readonly RemoteRank[];
  /** It does not fit this engine; its agents can be notified. */
  readonly refused?:
    | { readonly error: KvError; readonly agents: ReadonlyMap<RankKey, Uint8Array> }
    | undefined;
  readonly clock: ClockOffset;
  /** Undefined for vLLM. */
  readonly incarnation: string | undefined;
  /** Counts registrations of the KV cache; undefined for vLLM. */
  readonly registrationGeneration?: number | undefined;
  readonly fingerprint?: string | undefined;
  readonly features: ReadonlySet<string>;
}

export interface RemoteRank {
  readonly tpRank: number;
  readonly geometry: RankGeometry;
  readonly agentMetadata: Uint8Array;
}

export interface ConnectorHandshakeOptions {
  readonly sideChannel: SideChannel;
  readonly settings: ConnectorSettings;
  /** Its model is part of the compatibility hash. */
  readonly engine: WorkerOptions["engine"];
  readonly cache: KvCacheConfig;
  readonly local: RankGeometry;
  /** Part of the compatibility hash. */
  readonly transferMode: "pull" | "push";
  readonly features?: readonly string[] | undefined;
  readonly log: Log;
}

export class ConnectorHandshake {
  readonly #options: ConnectorHandshakeOptions;
  readonly #factors: CompatibilityFactors;
  readonly #hash: string;

  constructor(options: ConnectorHandshakeOptions) {
    const { engine, cache, log } = options;
    this.#options = options;
    this.#factors = {
      vllm_version: engine.model.vllmVersion,
      nixl_connector_version: engine.model.connectorVersion,
      model: engine.model.model,
      dtype: cache.dtype,
      num_kv_heads: cache.numKvHeads,
      head_size: cache.headSize,
      num_hidden_layers: cache.numHiddenLayers,
      attn_backend_name: engine.model.hashedAttentionBackend ?? cache.attentionBackend,
      cache_dtype: cache.cacheDtype,
      is_hma_enabled: engine.model.isHmaEnabled,
      speculative_config: engine.model.speculativeConfig,
      transfer_mode: options.transferMode,
    };
    this.#hash = compatibilityHash(this.#factors);
    const { announcedBlockSize } = options.settings;
    if (announcedBlockSize !== undefined && options.transferMode === "pull")
      log.warn("setting-not-used", {
        key: "kv_connector_extra_config.push_announced_block_size",
        value: announcedBlockSize,
        reason: "a decode worker that reads must know the real size; only push uses it",
      });
    if (this.#factors.attn_backend_name !== cache.attentionBackend) {
      log.warn("compatibility-factor-adopted", {
        factor: "attn_backend_name",
        ours: cache.attentionBackend,
        announced: this.#factors.attn_backend_name,
        consequence:
          "the hash does not distinguish these attention backends; the plan and the peer must agree on the layout within a head",
      });
    }
  }

  payload(agentMetadata: Uint8Array): Uint8Array {
    const { engine, features, local, settings, transferMode } = this.#options;
    const metadata = describeRank(local, { engineId: engine.engineId, agentMetadata });
    const { announcedBlockSize } = settings;
    const isAnnounced = transferMode === "push" && announcedBlockSize !== undefined;
    return encodeHandshakePayload({
      compatibilityHash: this.#hash,
      agentMetadataBytes: encodeAgentMetadata(
        isAnnounced ? announcedInBlocksOf(metadata, announcedBlockSize) : metadata,
      ),
      extension: {
        version: 1,
        factors: this.#factors,
        ...(features === undefined ? {} : { features }),
      },
      rest: {},
    });
  }

  /**
   * Asks each rank for its metadata (vLLM: `_nixl_handshake`).
   * @throws The errors of `SideChannel.request`; `KV_HANDSHAKE_REFUSED`; `KV_HANDSHAKE_UNTRUSTED`
   * when the payload was changed on its way; `KV_HANDSHAKE_WRONG_ENGINE`;
   * `KV_HANDSHAKE_INCOMPATIBLE` for an older connector; `KV_WIRE_MALFORMED`;
   * `KV_WIRE_LIMIT_EXCEEDED` also for the answers of all ranks together.
   */
  async ask(address: EngineAddress, tpRanks: readonly number[]): Promise<RemoteRanks> {
    const { engineId } = address;
    const ownEngineId = this.#options.engine.engineId;
    const { log, settings } = this.#options;
    const answers: RankAnswer[] = [];
    const budget = new AnswerBudget(address);
    for (let ppRank = 0; ppRank < address.ppSize; ppRank++) {
      // One at a time, as a listener answers: waiting would distort the clock samples.
      for (const tpRank of tpRanks)
        answers.push(await this.#askRank(address, { ppRank, tpRank }, budget));
    }
    const samples = answers.flatMap(({ sample }) => sample ?? []);
    if (samples.length === 0) {
      throw new KvError(
        "KV_HANDSHAKE_INCOMPATIBLE",
        `${describeEngine(address)} did not send its clock: its connector is older than version 5, this one speaks version 15`,
        { hint: "upgrade the peer to vLLM 0.32 or later" },
      );
    }

    const [difference] = answers.flatMap((answer) => answer.difference ?? []);
    const isRefused = difference !== undefined && settings.enforceCompatibility;
    const judged = this.#judged(answers, address, isRefused ? difference.error : undefined);
    if (difference !== undefined && !isRefused) {
      log.warn("compatibility-relaxed", {
        engineId,
        ownEngineId,
        setting: "kv_connector_extra_config.enforce_handshake_compat",
        how: difference.why.how,
        ignored: difference.why.text,
        differences: difference.why.differences,
      });
    }
    if (!isRefused) {
      log.info("handshake-done", {
        engineId,
        ownEngineId,
        tpRanks,
        compatibility:
          difference === undefined
            ? `compatibility check passed (hash ${this.#hash})`
            : "compatibility check relaxed",
      });
    }

    const { extension } = answers.at(-1)?.payload ?? {};
    const { incarnation, features, registration_generation: registration } = extension ?? {};
    return {
      ...judged,
      clock: clockOffset(samples),
      incarnation: typeof incarnation === "string" && incarnation !== "" ? incarnation : undefined,
      registrationGeneration: Number.isSafeInteger(registration) ? Number(registration) : undefined,
      fingerprint: fingerprintOf(answers),
      features: new Set(
        Array.isArray(features) ? features.filter((name) => typeof name === "string") : [],
      ),
    };
  }

  async #askRank(
    address: EngineAddress,
    rank: { readonly ppRank: number; readonly tpRank: number },
    budget: AnswerBudget,
  ): Promise<RankAnswer> {
    const { sideChannel, settings } = this.#options;
    const { host, port } = address;
    const reply = await sideChannel.request({
      host,
      port: settings.perWorkerPorts ? port + rank.tpRank : port,
      frames: [encodeHandshakeRequest(rank)],
      timeoutMs: settings.handshakeTimeoutMs,
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
    checkHandshakeSeal(payload, rank);
    const difference = this.#differenceOf(address, payload);
    let metadata: AgentMetadata;
    try {
      metadata = decodeAgentMetadata(payload.agentMetadataBytes);
    } catch (error) {
      // Another version's metadata may not be readable.
      throw (settings.enforceCompatibility && difference?.error) || error;
    }
    checkEngine(address, metadata);
    const { sentAtMs, receivedAtMs } = reply;
    const sample =
      clockSeconds === undefined
        ? undefined
        : { sentAtMs, receivedAtMs, remoteSeconds: clockSeconds };
    return { ...rank, payload, metadata, difference, sample };
  }

  #differenceOf(
    address: EngineAddress,
    { compatibilityHash: theirs, extension }: HandshakePayload,
  ): RankAnswer["difference"] {
    if (theirs === this.#hash) return undefined;
    const sent = extension?.factors;
    const factors = typeof sent === "object" && sent !== null ? { factors: { ...sent } } : {};
    const why = explainCompatibility({ ...this.#factors }, { hash: theirs, ...factors });
    const error = new KvError(
      "KV_HANDSHAKE_INCOMPATIBLE",
      `${describeEngine(address)} cannot be read from: ${why.text}`,
      {
        hint: 'make the two configurations equal, or set "enforce_handshake_compat": false in kv_connector_extra_config to read all the same',
        details: { ours: this.#hash, theirs, differences: why.differences },
      },
    );
    return { why, error };
  }

  #judged(
    ranks: readonly RankAnswer[],
    { tpSize, ppSize }: EngineAddress,
    incompatible: KvError | undefined,
  ): Pick<RemoteRanks, "ranks" | "refused"> {
    const { engine, local } = this.#options;
    try {
      if (incompatible !== undefined) throw incompatible;
      const described = ranks.map(({ ppRank, tpRank, metadata }) => {
        const rank = ppSize === 1 ? { tpRank, tpSize } : { tpRank, tpSize, ppRank, ppSize };
        const geometry = remoteGeometry(metadata, rank, local, `model ${engine.model.model}`);
        return { tpRank, geometry, agentMetadata: metadata.agentMetadata };
      });
      return { ranks: described };
    } catch (thrown) {
      const error = KvError.from(
        thrown,
        "KV_INTERNAL",
        `the handshake of engine ${engine.engineId}`,
      );
      const agents = ranks.map((rank) => [rankKey(rank), rank.metadata.agentMetadata] as const);
      return { ranks: [], refused: { error, agents: new Map(agents) } };
    }
  }
}

/** A hundred times what 256 ranks send over UCX: a hostile engine must not fill the memory. */
const MAX_ANSWER_BYTES = 64 * 2 ** 20;
const MAX_ANSWERING_MS = 60_000;

interface RankAnswer {
  readonly ppRank: number;
  readonly tpRank: number;
  readonly payload: HandshakePayload;
  readonly metadata: AgentMetadata;
  /** Undefined for an equal compatibility hash. `error`: for one that is not accepted. */
  readonly difference:
    | { readonly why: CompatibilityExplanation; readonly error: KvError }
    | undefined;
  readonly sample: ClockSample | undefined;
}

/** Equal for the same process with the same registered caches. */
function fingerprintOf(answers: readonly RankAnswer[]): string {
  const received = createHash("sha256");
  for (const { ppRank, tpRank, payload } of answers) {
    const { incarnation, registration_generation: registration } = payload.extension ?? {};
    const names = [String(incarnation), String(registration)];
    received.update(encodeMsgpack([ppRank, tpRank, payload.agentMetadataBytes, ...names]));
  }
  return received.digest("hex");
}

/** Limits all ranks' answers together, in bytes and time. */
class AnswerBudget {
  readonly #address: EngineAddress;
  #bytes = 0;
  #beganAtMs: number | undefined;

  constructor(address: EngineAddress) {
    this.#address = address;
  }

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

export interface ClockSample {
  readonly sentAtMs: number;
  readonly receivedAtMs: number;
  /** The peer's monotonic clock (vLLM: `time.perf_counter()` of the scheduler process). */
  readonly remoteSeconds: number;
}

export interface ClockOffset {
  readonly offsetMs: number;
  /** Round trip of the sample in use; the error is at most half of it. */
  readonly rttMs: number;
  /** Never later than the true time. */
  earliestLocalMs(remoteSeconds: number): number;
}

/**
 * Uses the sample with the shortest round trip, as vLLM 0.33 does.
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
  // The peer read its clock after the request left, so remote − local is at most this.
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
