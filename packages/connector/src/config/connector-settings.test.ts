import { describe, expect, it } from "vitest";
import { connectorSettings } from "./connector-settings.js";
import { readTransferConfig } from "./transfer-config.js";

const read = (extra: Record<string, unknown> = {}, env: Record<string, string> = {}) =>
  connectorSettings(
    readTransferConfig(
      { kv_connector: "NixlConnector", kv_role: "kv_both", kv_connector_extra_config: extra },
      { env },
    ),
  );

describe("connectorSettings", () => {
  it("has vLLM 0.33's defaults", () => {
    expect(read()).toEqual({
      leaseMs: 30_000,
      extensionMs: 20_000,
      heartbeatIntervalMs: 5000,
      unattendedLeaseMs: undefined,
      leaseMarginMs: 5000,
      engineTtlMs: 3_600_000,
      requestTimeoutMs: 60_000,
      registrationTimeoutMs: 480_000,
      kvPeerRegistrationTimeoutMs: 60_000,
      decoderBlocksTtlMs: 480_000,
      readsBack: false,
      recomputeThresholdTokens: 64,
      handshakeTimeoutMs: 5000,
      enforceCompatibility: true,
      requiresKvPeer: false,
      perWorkerPorts: false,
      announcedBlockSize: undefined,
      cachesUnverifiedKv: false,
      isLayerwise: false,
      seedsFirstToken: false,
    });
  });

  it("derives heartbeat times from the lease, and reads the environment variable and the other settings", () => {
    expect(read({ kv_lease_duration: 6 })).toMatchObject({
      extensionMs: 4000,
      heartbeatIntervalMs: 1000,
    });
    // As vLLM 0.33's push_scheduler.py.
    expect(read({ decoder_kv_blocks_ttl: 90 }).registrationTimeoutMs).toBe(90_000);
    expect(read({ push_registration_timeout: 7 })).toMatchObject({
      registrationTimeoutMs: 7000,
      kvPeerRegistrationTimeoutMs: 7000,
    });
    expect(read({}, { VLLM_NIXL_ABORT_REQUEST_TIMEOUT: "120" }).unattendedLeaseMs).toBe(120_000);
    expect(read({ push_announced_block_size: 32 }).announcedBlockSize).toBe(32);
    expect(
      read({ bidirectional_kv_xfer: true, kv_recompute_threshold: 0, decoder_kv_blocks_ttl: 90 }),
    ).toMatchObject({ readsBack: true, recomputeThresholdTokens: 0, decoderBlocksTtlMs: 90_000 });
    expect(read({ engine_ttl: 0, request_timeout: 5, per_worker_ports: true })).toMatchObject({
      engineTtlMs: 0,
      requestTimeoutMs: 5000,
      perWorkerPorts: true,
    });
  });

  it.each([
    { kv_lease_duration: 0 },
    { kv_lease_duration: "30" },
    { engine_ttl: -1 },
    { push_registration_timeout: 3e6 },
    { per_worker_ports: 1 },
    { kv_recompute_threshold: 1.5 },
    { handshake_key_file: "" },
    { handshake_key_require: true },
    { side_channel_curve: true },
    { side_channel_curve: false },
    { require_kv_peer: 1 },
    { push_announced_block_size: 0 },
    { push_announced_block_size: "32" },
    { bidirectional_kv_xfer: "true" },
    { kv_recompute_threshold: -1 },
    { kv_recompute_threshold: "64" },
    { decoder_kv_blocks_ttl: 0 },
    { request_timeout: Number.POSITIVE_INFINITY },
    { enforce_handshake_compat: "no" },
    { VLLM_NIXL_ABORT_REQUEST_TIMEOUT: "soon" },
  ])("refuses %j, and the error names the setting", (given: Record<string, unknown>) => {
    const [name = ""] = Object.keys(given);
    const ofEnvironment = name.startsWith("VLLM_");
    expect(() => (ofEnvironment ? read({}, given as Record<string, string>) : read(given))).toThrow(
      expect.objectContaining({
        code: "KV_CONFIG_INVALID",
        message: expect.stringContaining(name) as string,
      }) as Error,
    );
  });
});
