import {
  type Clock,
  KvError,
  type KvTransferConfig,
  type Log,
  type SideChannel,
} from "@kv/interface";
import { type HandshakeKeys, readHandshakeKeys } from "@kv/side-channel";
import { MAX_SECONDS } from "./transfer-config-schema.js";

/**
 * The settings that pull and push read from the transfer config, with vLLM 0.33's defaults.
 * Durations are in ms.
 */
export interface ConnectorSettings {
  /** `kv_lease_duration` (30 s). */
  readonly leaseMs: number;
  /** How much a heartbeat extends a lease from its arrival: two thirds of a lease. */
  readonly extensionMs: number;
  readonly heartbeatIntervalMs: number;
  /**
   * `VLLM_NIXL_ABORT_REQUEST_TIMEOUT`: the lease of a request that gets no heartbeat. Undefined
   * when the variable is not set.
   */
  readonly unattendedLeaseMs: number | undefined;
  /**
   * Safety margin before the end of a lease when P does not answer lease queries: 5 s (vLLM), or a
   * sixth of a shorter lease.
   */
  readonly leaseMarginMs: number;
  /** `engine_ttl` (3600 s): an unused remote engine is closed after this long; 0 means never. */
  readonly engineTtlMs: number;
  /** `request_timeout` (60 s): from the order until the KV is in place, with the handshake. */
  readonly requestTimeoutMs: number;
  /**
   * `push_registration_timeout` (default `decoder_kv_blocks_ttl`): from a registration until the KV
   * is in place, with P's queue and forward pass.
   */
  readonly registrationTimeoutMs: number;
  /**
   * The same at an `@kv` P (default `request_timeout`): it says when it will not write, so that D
   * need not wait for long after a lost message.
   */
  readonly kvPeerRegistrationTimeoutMs: number;
  /**
   * `decoder_kv_blocks_ttl` (480 s). Pull: how long D keeps the blocks of a finished request for a
   * P that reads them back. Push: how long D does not reuse blocks that a P which does not answer
   * may still write to.
   */
  readonly decoderBlocksTtlMs: number;
  /**
   * `bidirectional_kv_xfer` (false): D keeps the blocks of a finished request, and P reads them
   * back for the next turn. Pull only.
   */
  readonly readsBack: boolean;
  /**
   * `kv_recompute_threshold` (64): P computes fewer tokens than this itself instead of reading them
   * back; 0: it reads all.
   */
  readonly recomputeThresholdTokens: number;
  readonly handshakeTimeoutMs: number;
  readonly enforceCompatibility: boolean;
  /**
   * `handshake_key_file`: the side channel is encrypted between those who have one of these keys,
   * and refuses all others; vLLM has no key.
   */
  readonly handshakeKeys: HandshakeKeys | undefined;
  /**
   * `require_kv_peer` (true with `handshake_key_file`): messages in vLLM's forms, which prove
   * nothing, do not act on requests.
   */
  readonly requiresKvPeer: boolean;
  /** `per_worker_ports` (false): one side-channel port per rank, as in vLLM's older guide. */
  readonly perWorkerPorts: boolean;
  /**
   * `push_announced_block_size`: the tokens in a block that a push P announces instead of its own.
   * It writes into the blocks of vLLM D's of that size, which would convert or refuse blocks of
   * another one. Undefined: P announces its own.
   */
  readonly announcedBlockSize: number | undefined;
  /**
   * `cache_unverified_kv` (false): KV that no P has compared with its prompt is reported as any
   * other, so the engine's prefix cache may share it.
   */
  readonly cachesUnverifiedKv: boolean;
  /**
   * `push_layerwise` (false): P writes a layer as soon as it is computed, while later layers are
   * being computed.
   */
  readonly isLayerwise: boolean;
  /**
   * `seed_first_token` (false): P passes the token that it has sampled on in its parameters, and D
   * emits it (vllm#51919, in no release).
   */
  readonly seedsFirstToken: boolean;
}

/**
 * Reads the settings.
 * @throws `KV_CONFIG_INVALID` naming the key and the value.
 */
export function connectorSettings({ extra, env }: KvTransferConfig): ConnectorSettings {
  const leaseMs = seconds(
    "kv_connector_extra_config.kv_lease_duration",
    extra.kv_lease_duration ?? 30,
    0.001,
  );
  const requestTimeout = extra.request_timeout ?? 60;
  const blocksTtl = extra.decoder_kv_blocks_ttl ?? 480;
  const decoderBlocksTtlMs = seconds(
    "kv_connector_extra_config.decoder_kv_blocks_ttl",
    blocksTtl,
    0.001,
  );
  const abortTimeout = env.VLLM_NIXL_ABORT_REQUEST_TIMEOUT;
  const handshakeKeys = readHandshakeKeys(
    "kv_connector_extra_config.handshake_key_file",
    extra.handshake_key_file,
  );
  const registrationTimeout = (otherwise: unknown) =>
    seconds(
      "kv_connector_extra_config.push_registration_timeout",
      extra.push_registration_timeout ?? otherwise,
      0.001,
    );
  for (const name of ["handshake_key_require", "side_channel_curve"]) {
    if (extra[name] === undefined || extra[name] === null) continue;
    throw new KvError(
      "KV_CONFIG_INVALID",
      `kv_connector_extra_config.${name} is no longer a setting`,
      {
        hint: "remove it: handshake_key_file alone encrypts the side channel and refuses peers without the key",
      },
    );
  }
  return {
    leaseMs,
    extensionMs: Math.floor((leaseMs * 2) / 3),
    heartbeatIntervalMs: Math.max(1, Math.floor(leaseMs / 6)),
    unattendedLeaseMs:
      abortTimeout === undefined || abortTimeout === ""
        ? undefined
        : seconds("VLLM_NIXL_ABORT_REQUEST_TIMEOUT", Number(abortTimeout), 0.001),
    leaseMarginMs: Math.min(5000, leaseMs / 6),
    engineTtlMs: seconds("kv_connector_extra_config.engine_ttl", extra.engine_ttl ?? 3600, 0),
    requestTimeoutMs: seconds("kv_connector_extra_config.request_timeout", requestTimeout, 0.001),
    registrationTimeoutMs: registrationTimeout(blocksTtl),
    kvPeerRegistrationTimeoutMs: registrationTimeout(requestTimeout),
    decoderBlocksTtlMs,
    readsBack: flag("bidirectional_kv_xfer", extra.bidirectional_kv_xfer ?? false),
    recomputeThresholdTokens:
      tokens("kv_connector_extra_config.kv_recompute_threshold", extra.kv_recompute_threshold, 0) ??
      64,
    handshakeTimeoutMs: 5000,
    enforceCompatibility: flag("enforce_handshake_compat", extra.enforce_handshake_compat ?? true),
    handshakeKeys,
    requiresKvPeer: flag("require_kv_peer", extra.require_kv_peer ?? handshakeKeys !== undefined),
    perWorkerPorts: flag("per_worker_ports", extra.per_worker_ports ?? false),
    announcedBlockSize: tokens(
      "kv_connector_extra_config.push_announced_block_size",
      extra.push_announced_block_size,
      1,
    ),
    cachesUnverifiedKv: flag("cache_unverified_kv", extra.cache_unverified_kv ?? false),
    isLayerwise: flag("push_layerwise", extra.push_layerwise ?? false),
    seedsFirstToken: flag("seed_first_token", extra.seed_first_token ?? false),
  };
}

function seconds(name: string, value: unknown, min: number): number {
  if (typeof value === "number" && value >= min && value <= MAX_SECONDS) return value * 1000;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `${name} is ${JSON.stringify(value)}, not a number of seconds from ${min} to ${MAX_SECONDS}`,
  );
}

function tokens(name: string, value: unknown, least: number): number | undefined {
  if (value === undefined || value === null) return undefined;
  if (Number.isSafeInteger(value) && Number(value) >= least) return Number(value);
  throw new KvError(
    "KV_CONFIG_INVALID",
    `${name} is ${JSON.stringify(value)}, not a number of tokens of at least ${least}`,
  );
}

function flag(name: string, value: unknown): boolean {
  if (typeof value === "boolean") return value;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `kv_connector_extra_config.${name} is ${JSON.stringify(value)}, not true or false`,
  );
}

/**
 * The engine's side channel, encrypted where `handshake_key_file` is set.
 * @throws `KV_CONFIG_INVALID` when the side channel cannot encrypt.
 */
export function encryptedSideChannel(
  given: SideChannel,
  { handshakeKeys: keys }: ConnectorSettings,
  { clock, log }: { readonly clock: Clock; readonly log: Log },
): SideChannel {
  if (keys === undefined) return given;
  if (given.withEncryption === undefined) {
    throw new KvError(
      "KV_CONFIG_INVALID",
      "kv_connector_extra_config.handshake_key_file is set, and the engine's side channel cannot encrypt",
      { hint: "use zmqSideChannel of @kv/side-channel, or leave handshake_key_file out" },
    );
  }
  return given.withEncryption(() => keys.current(clock, log));
}
