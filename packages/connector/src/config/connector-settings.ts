import {
  type Clock,
  KvError,
  type KvTransferConfig,
  type Log,
  type SideChannel,
} from "@kv/interface";
import { type HandshakeKeys, readHandshakeKeys } from "@kv/side-channel";
import { z } from "zod";
import { extraConfigSchema, readBy, seconds } from "./transfer-config-schema.js";

/**
 * What pull and push read from the transfer config, with vLLM 0.33's defaults. Durations are in ms.
 */
export interface ConnectorSettings {
  /** `kv_lease_duration` (30 s). */
  readonly leaseMs: number;
  /** Added to a lease by a heartbeat, from its arrival: two thirds of a lease. */
  readonly extensionMs: number;
  readonly heartbeatIntervalMs: number;
  /** `VLLM_NIXL_ABORT_REQUEST_TIMEOUT`: the lease of a request that gets no heartbeat. */
  readonly unattendedLeaseMs: number | undefined;
  /**
   * D stops this long before a lease ends when P answers no lease queries: 5 s (vLLM), or a sixth
   * of a shorter lease.
   */
  readonly leaseMarginMs: number;
  /** `engine_ttl` (3600 s): how long an unused remote engine stays open; 0 means forever. */
  readonly engineTtlMs: number;
  /** `request_timeout` (60 s): from the order until the KV is in place. */
  readonly requestTimeoutMs: number;
  /**
   * `push_registration_timeout` (default `decoder_kv_blocks_ttl`): the same from a registration on,
   * at a vLLM P that has not answered. It covers P's queue and forward pass.
   */
  readonly registrationTimeoutMs: number;
  /**
   * The same (default `request_timeout`) at an `@kv` P, which says when it will not write, and at a
   * vLLM P that has answered.
   */
  readonly kvPeerRegistrationTimeoutMs: number;
  /**
   * `decoder_kv_blocks_ttl` (480 s): how long D keeps blocks that P may still read back (pull) or
   * write to (push).
   */
  readonly decoderBlocksTtlMs: number;
  /**
   * `bidirectional_kv_xfer` (false): P reads a finished request's blocks back from D. Pull only.
   */
  readonly readsBack: boolean;
  /**
   * `kv_recompute_threshold` (64): P computes fewer tokens than this instead of reading them back.
   */
  readonly recomputeThresholdTokens: number;
  readonly handshakeTimeoutMs: number;
  readonly enforceCompatibility: boolean;
  /** `handshake_key_file`: only holders of these keys can use the side channel. vLLM has no key. */
  readonly handshakeKeys: HandshakeKeys | undefined;
  /**
   * `require_kv_peer` (true with `handshake_key_file`): messages in vLLM's forms, which prove
   * nothing, have no effect.
   */
  readonly requiresKvPeer: boolean;
  /** `per_worker_ports` (false): one side-channel port per rank, as in vLLM's older guide. */
  readonly perWorkerPorts: boolean;
  /**
   * `push_announced_block_size`: the tokens per block that a push P announces, for vLLM D's with
   * other blocks than P's.
   */
  readonly announcedBlockSize: number | undefined;
  /**
   * `cache_unverified_kv` (false): the prefix cache may share KV that no P has compared with its
   * prompt.
   */
  readonly cachesUnverifiedKv: boolean;
  /** `push_layerwise` (false): P writes each layer as soon as it is computed. */
  readonly isLayerwise: boolean;
  /**
   * `seed_first_token` (false): P passes on its sampled token, and D emits it (vllm#51919, in no
   * release).
   */
  readonly seedsFirstToken: boolean;
}

const CONNECTOR_KEYS = extraConfigSchema.omit({
  backends: true,
  num_threads: true,
  connectors: true,
});
const ABORT_TIMEOUT = "VLLM_NIXL_ABORT_REQUEST_TIMEOUT";
const ENVIRONMENT = z.object({ [ABORT_TIMEOUT]: seconds(0.001, "") });

/** @throws `KV_CONFIG_INVALID` naming the key and the value. */
export function connectorSettings({ extra, env }: KvTransferConfig): ConnectorSettings {
  const within = "kv_connector_extra_config.";
  for (const name of ["handshake_key_require", "side_channel_curve"]) {
    if (extra[name] === undefined || extra[name] === null) continue;
    throw new KvError("KV_CONFIG_INVALID", `${within}${name} is no longer a setting`, {
      hint: "remove it: handshake_key_file alone encrypts the side channel and refuses peers without the key",
    });
  }

  const given = readBy(CONNECTOR_KEYS, extra, within);
  const unattended = env[ABORT_TIMEOUT] ? Number(env[ABORT_TIMEOUT]) : undefined;
  readBy(ENVIRONMENT, { [ABORT_TIMEOUT]: unattended }, "");
  const leaseMs = (given.kv_lease_duration ?? 30) * 1000;
  const blocksTtl = given.decoder_kv_blocks_ttl ?? 480;
  const requestTimeout = given.request_timeout ?? 60;
  const registration = given.push_registration_timeout;
  const handshakeKeys = readHandshakeKeys(`${within}handshake_key_file`, given.handshake_key_file);
  return {
    leaseMs,
    extensionMs: Math.floor((leaseMs * 2) / 3),
    heartbeatIntervalMs: Math.max(1, Math.floor(leaseMs / 6)),
    unattendedLeaseMs: unattended && unattended * 1000,
    leaseMarginMs: Math.min(5000, leaseMs / 6),
    engineTtlMs: (given.engine_ttl ?? 3600) * 1000,
    requestTimeoutMs: requestTimeout * 1000,
    registrationTimeoutMs: (registration ?? blocksTtl) * 1000,
    kvPeerRegistrationTimeoutMs: (registration ?? requestTimeout) * 1000,
    decoderBlocksTtlMs: blocksTtl * 1000,
    readsBack: given.bidirectional_kv_xfer ?? false,
    recomputeThresholdTokens: given.kv_recompute_threshold ?? 64,
    handshakeTimeoutMs: 5000,
    enforceCompatibility: given.enforce_handshake_compat ?? true,
    handshakeKeys,
    requiresKvPeer: given.require_kv_peer ?? handshakeKeys !== undefined,
    perWorkerPorts: given.per_worker_ports ?? false,
    announcedBlockSize: given.push_announced_block_size ?? undefined,
    cachesUnverifiedKv: given.cache_unverified_kv ?? false,
    isLayerwise: given.push_layerwise ?? false,
    seedsFirstToken: given.seed_first_token ?? false,
  };
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
