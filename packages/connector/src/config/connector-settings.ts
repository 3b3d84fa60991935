import { KvError, type KvTransferConfig } from "@kv/interface";
import { readHandshakeKey } from "./handshake-key.js";

/** What pull and push read of the transfer config, in milliseconds, with vLLM 0.33's defaults. */
export interface PairSettings {
  /** `kv_lease_duration` (30 s). */
  readonly leaseMs: number;
  /** What a heartbeat gives: two thirds of a lease. */
  readonly extensionMs: number;
  /** A sixth of a lease. */
  readonly heartbeatIntervalMs: number;
  /** `VLLM_NIXL_ABORT_REQUEST_TIMEOUT`, where set: the lease of a request that no heartbeat ever named. */
  readonly unattendedLeaseMs: number | undefined;
  /** Kept back from a lease whose producer cannot be asked: 5 s (vLLM), or a sixth of a lease that is short. */
  readonly leaseMarginMs: number;
  /** `engine_ttl` (3600 s); 0: never. */
  readonly engineTtlMs: number;
  /** `request_timeout` (60 s): from the order to the KV in place, the handshake included. */
  readonly requestTimeoutMs: number;
  /** `push_registration_timeout`, or `request_timeout`: from a registration to the KV in place, the producer's forward pass included. */
  readonly registrationTimeoutMs: number;
  /** `decoder_kv_blocks_ttl` (480 s): how long blocks stay out of use that a silent producer may write to yet. */
  readonly blocksAtRiskMs: number;
  readonly handshakeTimeoutMs: number;
  /** `enforce_handshake_compat` (true). */
  readonly enforceCompatibility: boolean;
  /** `handshake_key_file`: signs what is told, and what peers tell must be signed with it. */
  readonly handshakeKey: Uint8Array | undefined;
  /** `per_worker_ports` (false): the ports of vLLM's older guide, one per rank. */
  readonly perWorkerPorts: boolean;
  /** `push_layerwise` (false): a layer is written when it is computed, while later ones are being computed. */
  readonly layerwise: boolean;
}

/** Errors: `KV_CONFIG_INVALID` naming the key and the value. */
export function pairSettings({ extra, env }: KvTransferConfig): PairSettings {
  const leaseMs = seconds(
    "kv_connector_extra_config.kv_lease_duration",
    extra.kv_lease_duration ?? 30,
    0.001,
  );
  const requestTimeout = extra.request_timeout ?? 60;
  const abortTimeout = env.VLLM_NIXL_ABORT_REQUEST_TIMEOUT;
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
    registrationTimeoutMs: seconds(
      "kv_connector_extra_config.push_registration_timeout",
      extra.push_registration_timeout ?? requestTimeout,
      0.001,
    ),
    blocksAtRiskMs: seconds(
      "kv_connector_extra_config.decoder_kv_blocks_ttl",
      extra.decoder_kv_blocks_ttl ?? 480,
      0.001,
    ),
    handshakeTimeoutMs: 5000,
    enforceCompatibility: flag("enforce_handshake_compat", extra.enforce_handshake_compat ?? true),
    handshakeKey: readHandshakeKey(extra),
    perWorkerPorts: flag("per_worker_ports", extra.per_worker_ports ?? false),
    layerwise: flag("push_layerwise", extra.push_layerwise ?? false),
  };
}

/** Node's timers hold no more, about 24 days. */
const MAX_SECONDS = 2_000_000;

function seconds(name: string, value: unknown, min: number): number {
  if (typeof value === "number" && value >= min && value <= MAX_SECONDS) return value * 1000;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `${name} is ${JSON.stringify(value)}, not a number of seconds from ${min} to ${MAX_SECONDS}`,
  );
}

function flag(name: string, value: unknown): boolean {
  if (typeof value === "boolean") return value;
  throw new KvError(
    "KV_CONFIG_INVALID",
    `kv_connector_extra_config.${name} is ${JSON.stringify(value)}, not true or false`,
  );
}
