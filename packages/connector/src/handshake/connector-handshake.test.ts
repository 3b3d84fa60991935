import { createRanks } from "@kv/conformance/engine/ranks";
import {
  type EngineIdentity,
  type KvCacheConfig,
  type LogFields,
  type SchedulerOptions,
  type SideChannelRequest,
  silentLog,
} from "@kv/interface";
import { compatibilityHash, decodeAgentMetadata, decodeHandshakePayload } from "@kv/protocol";
import { engineIdentity } from "@kv/testing/engine-identity";
import { manualClock } from "@kv/testing/manual-clock";
import { simConfig } from "@kv/testing/simulator/sim-options";
import { memoryNetwork, memorySideChannel, memoryTransport } from "@kv/transport-memory";
import { describe, expect, it } from "vitest";
import { connectorSettings } from "../config/connector-settings.js";
import { readTransferConfig } from "../config/transfer-config.js";
import { ConnectorHandshake } from "./connector-handshake.js";
import { EngineListener } from "./engine-listener.js";
import { localGeometry } from "./rank-geometry.js";

interface Given {
  readonly engineId?: string;
  readonly extra?: Readonly<Record<string, unknown>>;
  readonly model?: Partial<EngineIdentity["model"]>;
  readonly cache?: Partial<KvCacheConfig>;
  readonly transferMode?: "pull" | "push";
  readonly tpSize?: number;
}

const network = memoryNetwork();

/** The handshakes of an engine's ranks, and what they log and ask. */
function engine({
  engineId = "e",
  extra = {},
  model = {},
  cache: change = {},
  transferMode = "pull",
  tpSize = 1,
}: Given) {
  const asked: SideChannelRequest[] = [];
  const logged: [event: string, fields: LogFields | undefined][] = [];
  const note = (event: string, fields?: LogFields) => void logged.push([event, fields]);
  const config = readTransferConfig({
    kv_connector: "NixlConnector",
    kv_role: "kv_both",
    kv_connector_extra_config: extra,
  });
  const settings = connectorSettings(config);
  const identity = engineIdentity(engineId, { tpSize, ...model });
  const memory = memorySideChannel({ network, host: engineId });
  const sideChannel = {
    ...memory,
    request(options: SideChannelRequest) {
      asked.push(options);
      return memory.request(options);
    },
  };
  const log = { ...silentLog, warn: note };
  const cache = { ...simConfig(16), ...change };
  const numBlocks = 8;
  const ranks = createRanks({
    transport: memoryTransport(),
    config: simConfig(16),
    tpSize,
    numBlocks,
  });
  const handshakes = ranks.caches.map(
    (caches, tpRank) =>
      new ConnectorHandshake({
        sideChannel,
        settings,
        engine: identity,
        cache,
        transferMode,
        log,
        local: localGeometry(caches, { tpRank, tpSize }),
      }),
  );
  const payloads = handshakes.map((handshake, tpRank) => ({
    tpRank,
    ppRank: 0,
    payload: handshake.payload(new Uint8Array([tpRank])),
  }));
  return {
    asked,
    logged,
    handshakes,
    told: payloads.map(({ payload }) => decodeHandshakePayload(payload)),
    /** Serves the ranks' payloads at port 5600 of the engine's own host. */
    async listen() {
      const listener = new EngineListener({
        sideChannel,
        settings,
        incarnation: "process",
        holds: () => ({ held: true }),
        clock: manualClock(),
        log,
        config: { ...config, sideChannelHost: engineId },
        engine: identity as SchedulerOptions["engine"],
      });
      await listener.publish(payloads);
      return listener;
    },
  };
}

const addressOf = (engineId: string, tpSize: number) => ({
  engineId,
  host: engineId,
  port: 5600,
  tpSize,
  dcpSize: 1,
  ppSize: 1,
});

describe("the compatibility hash", () => {
  const factorsOf = (given: Given) =>
    engine(given).told[0]?.extension?.factors as Readonly<Record<string, unknown>>;
  const usual = factorsOf({});
  const changes: Readonly<Record<string, readonly [Given, unknown]>> = {
    vllm_version: [{ model: { vllmVersion: "0.32.0" } }, "0.32.0"],
    nixl_connector_version: [{ model: { connectorVersion: 14 } }, 14],
    model: [{ model: { model: "another" } }, "another"],
    dtype: [{ cache: { dtype: "torch.bfloat16" } }, "torch.bfloat16"],
    num_kv_heads: [{ cache: { numKvHeads: 8 } }, 8],
    head_size: [{ cache: { headSize: 128 } }, 128],
    num_hidden_layers: [{ cache: { numHiddenLayers: 40 } }, 40],
    attn_backend_name: [{ cache: { attentionBackend: "FLASH_ATTN" } }, "FLASH_ATTN"],
    cache_dtype: [{ cache: { cacheDtype: "fp8" } }, "fp8"],
    is_hma_enabled: [{ model: { isHmaEnabled: true } }, true],
    speculative_config: [{ model: { speculativeConfig: { method: "mtp" } } }, { method: "mtp" }],
    transfer_mode: [{ transferMode: "push" }, "push"],
  };

  it.each(Object.entries(changes))("takes %s from the engine", (factor, [given, value]) => {
    expect(factorsOf(given)).toEqual({ ...usual, [factor]: value });
    const hash = engine(given).told[0]?.compatibilityHash;
    expect(hash).toBe(compatibilityHash(factorsOf(given) as never));
    expect(hash).not.toBe(compatibilityHash(usual as never));
  });

  it("has no other factors", () => {
    expect(Object.keys(usual).sort()).toEqual(Object.keys(changes).sort());
  });

  it("has the attention backend that the engine was told to hash, with a warning that names both", () => {
    const { told, logged } = engine({ model: { hashedAttentionBackend: "CPU_ATTN" } });
    expect(told[0]?.extension?.factors).toEqual({ ...usual, attn_backend_name: "CPU_ATTN" });
    expect(logged).toMatchObject([
      [
        "compatibility-factor-adopted",
        { factor: "attn_backend_name", ours: "SIM", announced: "CPU_ATTN" },
      ],
    ]);
  });
});

describe("push_announced_block_size", () => {
  const announced = (given: Given) => {
    const { told, logged } = engine({ extra: { push_announced_block_size: 32 }, ...given });
    const { blockSize, numBlocks, blockLengthsBytes } = decodeAgentMetadata(
      told[0]?.agentMetadataBytes ?? new Uint8Array(),
    );
    return { blockSize, numBlocks, bytes: blockLengthsBytes[0], logged };
  };

  it("is the block size in the payload of a push engine: as much memory, in blocks of that size", () => {
    const own = announced({ transferMode: "push", extra: {} });
    expect(own).toMatchObject({ blockSize: 16, numBlocks: 8 });
    const bytes = 2 * (own.bytes ?? 0);
    expect(announced({ transferMode: "push" })).toEqual({
      blockSize: 32,
      numBlocks: 4,
      bytes,
      logged: [],
    });
  });

  it("is not announced by a pull engine, which warns that the setting has no effect", () => {
    expect(announced({ transferMode: "pull" })).toMatchObject({
      blockSize: 16,
      numBlocks: 8,
      logged: [
        [
          "setting-not-used",
          { key: "kv_connector_extra_config.push_announced_block_size", value: 32 },
        ],
      ],
    });
  });
});

describe("a handshake with an engine of TP 2", () => {
  it.each([
    [{}, [5600, 5600]],
    [{ per_worker_ports: true }, [5600, 5601]],
  ])("with %j, D asks for the ranks at the ports %j, within 5 s each", async (extra, ports) => {
    await using _listener = await engine({ engineId: "p", tpSize: 2, extra }).listen();
    const { handshakes, asked } = engine({ engineId: "d", extra });
    const { ranks, incarnation } = (await handshakes[0]?.ask(addressOf("p", 2), [0, 1])) ?? {};
    expect(ranks?.map(({ tpRank, agentMetadata }) => [tpRank, ...agentMetadata])).toEqual([
      [0, 0],
      [1, 1],
    ]);
    expect(incarnation).toBe("process");
    expect(asked.map(({ port, timeoutMs }) => [port, timeoutMs])).toEqual(
      ports.map((port) => [port, 5000]),
    );
  });
});

describe("a handshake with another model", () => {
  const ANOTHER = { differences: [{ factor: "model", theirs: "another" }] };
  it.each([
    [{}, "KV_HANDSHAKE_INCOMPATIBLE", []],
    [{ enforce_handshake_compat: false }, "ok", [["compatibility-relaxed", ANOTHER]]],
  ])("with %j: %s, with the warnings %j", async (extra, outcome, warnings) => {
    await using _listener = await engine({ engineId: "p", model: { model: "another" } }).listen();
    const { handshakes, logged } = engine({ engineId: "d", extra });
    const { refused, ranks } = (await handshakes[0]?.ask(addressOf("p", 1), [0])) ?? {};
    expect(refused?.error.code ?? "ok").toBe(outcome);
    // Its agent can be told so.
    expect(
      refused?.agents ?? new Map(ranks?.map((rank) => ["pp0tp0", rank.agentMetadata])),
    ).toEqual(new Map([["pp0tp0", new Uint8Array([0])]]));
    expect(logged).toMatchObject(warnings);
  });
});
