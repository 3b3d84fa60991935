import {
  type Agent,
  type Clock,
  type DescriptorTable,
  type KvCaches,
  KvError,
  type Log,
  type LogFields,
  type PreparedList,
  type SideChannel,
  type Tracer,
  type WorkerOptions,
} from "@kv/interface";
import {
  buildEngineTransferPlan,
  type EngineTransferPlan,
  type JointGroups,
  joinGroups,
  type ModelGeometry,
  type RankGeometry,
} from "@kv/plan";
import type { RemoteLease } from "@kv/protocol";
import { handshakeSourceRanks, handshakeTargetRanks } from "@kv/topology";
import type { ConnectorSettings } from "../config/connector-settings.js";
import type { ConnectorHandshake, RemoteRanks } from "../handshake/connector-handshake.js";
import type { ClockOffset } from "../handshake/handshake-client.js";
import {
  type EngineAddress,
  type RankKey,
  type RemoteRequest,
  rankKey,
} from "../requests/remote-request.js";
import type { SharedLocalLists, SharedRemoteAgents } from "./shared-agent-state.js";
import type { TransferMetrics } from "./transfers.js";

/**
 * What remote engines need of their worker: one agent, its registered caches, and the engine's
 * clock, log and options.
 */
export interface PeerContext {
  readonly clock: Clock;
  readonly log: Log;
  readonly metrics: TransferMetrics;
  /** Records the worker's spans; undefined where none are wanted. */
  readonly tracer?: Tracer | undefined;
  readonly options: WorkerOptions;
  readonly settings: ConnectorSettings;
  readonly sideChannel: SideChannel;
  readonly agent: Agent;
  readonly caches: KvCaches;
  readonly local: RankGeometry;
  /** The model's KV cache groups in the form that plans use. */
  readonly model: ModelGeometry;
  readonly handshake: ConnectorHandshake;
  readonly localLists: SharedLocalLists;
  readonly remoteAgents: SharedRemoteAgents;
}

/** An engine after a handshake. */
export interface OpenEngine {
  readonly address: EngineAddress;
  /**
   * How often the engine has registered its KV cache; undefined for vLLM, which says so only in
   * `kv_transfer_params`.
   */
  readonly registrationGeneration?: number | undefined;
  /**
   * Differs when another handshake would lead to other memory or to another process. Undefined:
   * every handshake differs.
   */
  readonly fingerprint?: string | undefined;
  readonly clock: ClockOffset;
  /**
   * The remote process; undefined for vLLM. A process with an incarnation answers lease queries.
   */
  readonly incarnation: string | undefined;
  readonly features: ReadonlySet<string>;
  /** Agent names of the ranks that were asked, of every pipeline stage. */
  readonly agents: ReadonlyMap<RankKey, string>;
}

/** A P, as a rank of D sees it: the plan, and the prepared lists of both sides. */
export interface RemoteEngine extends OpenEngine {
  readonly plan: EngineTransferPlan;
  /**
   * Set when the remote engine groups the layers differently. Requests are then planned in joint
   * groups.
   */
  readonly joint?: JointGroups | undefined;
  /**
   * Prepared lists per source, in the order of `plan.sources`; empty where this side transfers
   * nothing.
   */
  readonly sources: readonly RemoteEngineSource[];
}

/** Prepared lists of one source, in the order of the source's `lists` in the plan. */
export interface RemoteEngineSource {
  /** One per pair of memory types; undefined where a pipeline stage has no memory of that type. */
  readonly lists: readonly (ListPair | undefined)[];
}

/** The local and the remote list of a transfer. */
export interface ListPair {
  readonly local: PreparedList;
  readonly remote: PreparedList;
}

/** A pair of lists before it is prepared. */
export interface ListTables {
  readonly rank: RankKey;
  readonly local: DescriptorTable;
  readonly remote: DescriptorTable;
  readonly localKey: string;
}

/** What is transferred with an engine that has answered a handshake. */
export interface EnginePlan<Engine extends OpenEngine> {
  readonly tables: readonly ListTables[];
  readonly log: LogFields;
  engine(open: OpenEngine, pairs: ReadonlyMap<ListTables, ListPair>): Engine;
}

/** A request, and the process of the remote engine that it names. */
export interface EngineRequest extends Omit<RemoteRequest, "lease"> {
  /** The process; undefined where that is vLLM. */
  readonly lease?: (Pick<RemoteLease, "incarnation"> & Partial<RemoteLease>) | undefined;
}

/**
 * A counted reference to an open engine. The engine stays open until every reference was released.
 */
export interface EngineReference<Engine> {
  readonly engine: Engine;
  release(): void;
}

/** How a worker uses remote engines. */
export interface RemoteEnginesOptions<Engine extends OpenEngine> {
  readonly failureType: string;
  /** What the remote engines do with the requests. A P of `@kv` answers lease queries. */
  readonly role: "prefill" | "decode";
  /**
   * Plans once per handshake.
   * @throws `KV_PLAN_UNSUPPORTED` for a pair that does not fit.
   */
  plan(address: EngineAddress, answer: RemoteRanks): EnginePlan<Engine>;
}

/** An engine that is open, and how to close it. */
export interface OpenedEngine<Engine extends OpenEngine> {
  readonly engine: Engine;
  /** Closes the engine's lists, then its agents. Rejects never: what fails is logged. */
  close(): Promise<void>;
}

interface OpenList {
  readonly remote: PreparedList;
  readonly localKey: string;
}

/**
 * Opens an engine: shakes hands with the ranks that the topology names, plans, adds the remote
 * agents and prepares the lists. When a step fails, it undoes the earlier ones.
 * @throws The errors of the handshake, of `planEngine` and of the transport.
 */
export async function openEngine<Engine extends OpenEngine>(
  { agent, handshake, local, localLists, log, options, remoteAgents }: PeerContext,
  address: EngineAddress,
  { plan: planEngine, role }: Pick<RemoteEnginesOptions<Engine>, "plan" | "role">,
): Promise<OpenedEngine<Engine>> {
  // Both sides count notifications by the tensor-parallel ranks of D, and cannot distinguish its
  // stages (vLLM 0.33 counts in the same way).
  const { ppSize } = options.engine;
  if (role === "prefill" && ppSize > 1) {
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `this engine has ${ppSize} pipeline stages, and engine ${address.engineId} counts decode workers by tensor-parallel rank: only prefill workers may have stages`,
      { hint: "use pipeline_parallel_size 1 for decode workers" },
    );
  }
  const tpRanks = (role === "prefill" ? handshakeTargetRanks : handshakeSourceRanks)({
    tpRank: local.tpRank,
    tpSize: local.tpSize,
    remoteTpSize: address.tpSize,
    dcpSize: local.dcpSize ?? 1,
    remoteDcpSize: address.dcpSize,
  });
  const { ranks, ...answer } = await handshake.ask(address, tpRanks);
  for (const { geometry } of ranks) {
    const { dcpSize = 1 } = geometry;
    if (dcpSize === address.dcpSize) continue;
    throw new KvError(
      "KV_PLAN_INCOMPATIBLE",
      `engine ${address.engineId} has decode context parallelism of ${dcpSize}, and the request says ${address.dcpSize}`,
      {
        hint: "pass dcp_size on with the other kv_transfer_params",
        details: { dcpSize, said: address.dcpSize },
      },
    );
  }
  const plan = planEngine(address, { ranks, ...answer });
  const agents = new Map<RankKey, string>();
  const lists: OpenList[] = [];
  const close = async () => {
    const failed = (what: string) => (error: unknown) =>
      log.warn("remote-engine-close-failed", {
        engineId: address.engineId,
        what,
        error: String(error),
      });
    // Lists first: an agent cannot be removed while lists name it.
    await Promise.all(
      lists.map(async ({ remote, localKey }) => {
        await remote.close().catch(failed("remote list"));
        await localLists.release(localKey).catch(failed("local list"));
      }),
    );
    for (const name of agents.values())
      await remoteAgents.remove(name).catch(failed(`agent ${name}`));
  };
  const pairs = new Map<ListTables, ListPair>();
  try {
    const owner = `${address.host}:${address.port}`;
    for (const rank of ranks)
      agents.set(rankKey(rank.geometry), await remoteAgents.add(rank.agentMetadata, owner));
    for (const tables of plan.tables) {
      const { rank, localKey } = tables;
      const remote = await agent.prepareRemote(agents.get(rank) ?? "", tables.remote);
      try {
        pairs.set(tables, {
          local: await localLists.acquire(localKey, () => tables.local),
          remote,
        });
        lists.push({ remote, localKey });
      } catch (error) {
        await remote.close();
        throw error;
      }
    }
  } catch (error) {
    await close();
    throw error;
  }
  const engine = plan.engine({ address, ...answer, agents }, pairs);
  log.info("remote-engine-ready", {
    engineId: address.engineId,
    ranks: [...agents.keys()],
    ...plan.log,
    clockOffsetMs: engine.clock.offsetMs,
    clockRttMs: engine.clock.rttMs,
  });
  return { engine, close };
}

/** How D uses the P's of its requests. */
export interface PrefillPlanOptions {
  /**
   * Supports engines that group the layers differently, with joint groups; else the plan refuses
   * them. @default false
   */
  readonly joinsGroups?: boolean | undefined;
  /** False where the other side moves the bytes and this side only notifies. @default true */
  readonly preparesLists?: boolean | undefined;
}

/**
 * What a rank of D transfers with a P: one plan for all ranks of P.
 * @throws `KV_PLAN_UNSUPPORTED`, `KV_TOPOLOGY_INVALID`.
 */
export function planPrefillEngine(
  { local, model, caches, options }: PeerContext,
  { ranks, incarnation }: RemoteRanks,
  { joinsGroups = false, preparesLists = true }: PrefillPlanOptions,
): EnginePlan<RemoteEngine> {
  const remotes = ranks.map(({ geometry }) => geometry);
  const joint = joinsGroups ? joinGroups({ local, remotes, ...model }) : undefined;
  const plan = buildEngineTransferPlan({
    local: joint?.local ?? local,
    remotes: joint?.remotes ?? remotes,
    ...(joint?.model ?? model),
    // A P that pushes always plans with this conversion. This side must plan the same, or it would
    // read P's HND blocks as NHD.
    conversions: options.config.enablePermuteLocalKv || !preparesLists ? ["hnd-to-nhd"] : [],
    // A receive pass needs host memory. In device memory, the transfer itself must put the bytes in
    // order.
    canPass: local.regions.every(({ memoryType }) => memoryType === "DRAM"),
    prefixCaching: caches.config.prefixCaching ?? true,
  });
  const sources = (preparesLists ? plan.sources : []).map(({ lists, remotePpRank, remoteRank }) =>
    lists.map(({ localListKey, localTable, remoteTable }): ListTables | undefined =>
      remoteTable.rows.length === 0
        ? undefined
        : {
            rank: rankKey({ ppRank: remotePpRank, tpRank: remoteRank }),
            local: localTable,
            remote: remoteTable,
            localKey: localListKey,
          },
    ),
  );
  return {
    tables: sources.flat().filter((tables) => tables !== undefined),
    log: {
      form: plan.form,
      formReason: plan.formReason,
      comparesPrompts: incarnation !== undefined,
      ...(joint === undefined ? {} : { jointGroups: joint.pairs }),
      conversions: plan.conversions,
    },
    engine: (open, pairs) => ({
      ...open,
      plan,
      joint,
      sources: sources.map((lists) => ({
        lists: lists.map((tables) => tables && pairs.get(tables)),
      })),
    }),
  };
}
