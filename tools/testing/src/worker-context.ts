import { readTransferConfig } from "@kv/connector";
import type { OpenEngine, WorkerContext } from "@kv/connector/building-blocks";
import { type Agent, type Clock, noMetrics, type PreparedList, silentLog } from "@kv/interface";
import type { ModelGeometry, RankGeometry } from "@kv/plan";
import { connectorSettings } from "../../../packages/connector/src/config/connector-settings.js";
import type { RemoteRank } from "../../../packages/connector/src/handshake/connector-handshake.js";
import { NotificationSender } from "../../../packages/connector/src/peers/messages.js";
import {
  SharedLocalLists,
  SharedRemoteAgents,
} from "../../../packages/connector/src/peers/remote-engine.js";
import { TransferMetrics } from "../../../packages/connector/src/peers/transfers.js";
import { WorkerOutputQueue } from "../../../packages/connector/src/worker/connector-worker.js";
import { engineIdentity } from "./engine-identity.js";
import { manualClock } from "./manual-clock.js";

/** One layer of 4 KV heads, 16 bytes per token and head, in 64 blocks of 16 tokens. */
export function testRank(change: Partial<RankGeometry> = {}, heads = 4): RankGeometry {
  const { kernelBlockSize = 16, tpSize = 1 } = change;
  const bytes = Math.max(1, heads / tpSize) * kernelBlockSize * 16;
  return {
    tpRank: 0,
    tpSize,
    kernelBlockSize,
    physicalBlocksPerLogical: 1,
    layout: "LBHNC",
    attentionBackend: "SIM",
    deviceId: 0,
    regions: [
      {
        name: "layers.0",
        baseAddress: 2 ** 20,
        numBlocks: 64,
        blockLengthBytes: bytes,
        blockStrideBytes: bytes,
        groupId: 0,
        memoryType: "DRAM",
      },
    ],
    ...change,
  };
}

const close = async () => {};

/** Moves nothing. Remote agents have the first byte of their metadata as name. */
export function listAgent(change: Partial<Agent> = {}): Agent {
  return {
    addRemote: async (metadata: Uint8Array) => `agent ${metadata[0]}`,
    removeRemote: async () => {},
    prepareLocal: async () => ({ close }) as PreparedList,
    prepareRemote: async (remote: string) => ({ remote, close }) as PreparedList,
    ...change,
  } as Partial<Agent> as Agent;
}

export interface TestContextOptions {
  readonly agent: Agent;
  readonly local: RankGeometry;
  readonly model?: ModelGeometry;
  /** See `testRanks`. */
  remote(
    tpRanks: readonly number[],
    address: OpenEngine["address"],
  ): readonly RemoteRank[] | Promise<readonly RemoteRank[]>;
  readonly answer?: Pick<OpenEngine, "registrationGeneration" | "fingerprint">;
  /** The remote engine's process; undefined: vLLM's. */
  readonly incarnation?: string | undefined;
  readonly features?: readonly string[];
  readonly clock?: Clock;
  readonly extra?: Readonly<Record<string, unknown>>;
  readonly prefixCaching?: boolean | undefined;
  readonly enablePermuteLocalKv?: boolean;
}

export const testRanks =
  (geometryOf: (tpRank: number) => RankGeometry) =>
  (tpRanks: readonly number[]): readonly RemoteRank[] =>
    tpRanks.map((tpRank) => ({
      tpRank,
      geometry: geometryOf(tpRank),
      agentMetadata: new Uint8Array([tpRank]),
    }));

/** Of engine `p`'s worker, without a side channel. */
export function testContext(options: TestContextOptions): WorkerContext {
  const {
    agent,
    local,
    model = { numKvHeads: 4, groups: ["full"] },
    clock = manualClock(),
  } = options;
  const config = readTransferConfig({
    kv_connector: "NixlConnector",
    kv_role: "kv_both",
    enable_permute_local_kv: options.enablePermuteLocalKv ?? false,
    kv_connector_extra_config: options.extra ?? {},
  });
  const settings = connectorSettings(config);
  return {
    agent,
    local,
    model,
    clock,
    settings,
    log: silentLog,
    metrics: new TransferMetrics(noMetrics),
    caches: { config: { prefixCaching: options.prefixCaching } },
    options: {
      config,
      engine: engineIdentity("p", { tpSize: local.tpSize }),
      tpRank: local.tpRank,
    },
    handshake: {
      ask: async (address: OpenEngine["address"], tpRanks: readonly number[]) => ({
        ranks: await options.remote(tpRanks, address),
        ...options.answer,
        clock: { offsetMs: 0, rttMs: 0 },
        incarnation: options.incarnation,
        features: new Set(options.features),
      }),
    },
    hasSingleGroup: model.groups.length === 1,
    output: new WorkerOutputQueue(settings),
    notifications: new NotificationSender({ agent, log: silentLog }),
    localLists: new SharedLocalLists(agent),
    remoteAgents: new SharedRemoteAgents(agent),
  } as unknown as WorkerContext;
}
