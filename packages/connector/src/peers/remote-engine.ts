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
import type { ConnectorSettings } from "../config/connector-settings.js";
import type {
  ClockOffset,
  ConnectorHandshake,
  RemoteRanks,
} from "../handshake/connector-handshake.js";
import {
  type EngineAddress,
  type RankKey,
  type RemoteRequest,
  rankKey,
  ranksToAsk,
} from "../requests/references.js";
import type { TransferMetrics } from "./transfers.js";

export interface PeerContext {
  readonly clock: Clock;
  readonly log: Log;
  readonly metrics: TransferMetrics;
  readonly tracer?: Tracer | undefined;
  readonly options: WorkerOptions;
  readonly settings: ConnectorSettings;
  readonly sideChannel: SideChannel;
  readonly agent: Agent;
  readonly caches: KvCaches;
  readonly local: RankGeometry;
  readonly model: ModelGeometry;
  readonly handshake: ConnectorHandshake;
  readonly localLists: SharedLocalLists;
  readonly remoteAgents: SharedRemoteAgents;
}

/** An engine that has answered a handshake. */
export interface OpenEngine {
  readonly address: EngineAddress;
  /** Counts registrations of the KV cache; vLLM sends it only in `kv_transfer_params`. */
  readonly registrationGeneration?: number | undefined;
  /** Equal for the same process and memory. Undefined: every handshake differs. */
  readonly fingerprint?: string | undefined;
  readonly clock: ClockOffset;
  /** The process that answers lease queries; undefined for vLLM. */
  readonly incarnation: string | undefined;
  readonly features: ReadonlySet<string>;
  readonly agents: ReadonlyMap<RankKey, string>;
}

/** An engine that has answered, and does not fit this one: it gets notifications only. */
export interface RefusedEngine extends OpenEngine {
  readonly refusal: KvError;
  /** How many of this engine's ranks notify each rank of it. */
  readonly notifiers: number;
}

/** A P as a rank of D sees it. */
export interface RemoteEngine extends OpenEngine {
  readonly plan: EngineTransferPlan;
  /** Set when P groups the layers differently: requests are planned in joint groups. */
  readonly joint?: JointGroups | undefined;
  /** In the order of `plan.sources`; empty where this side transfers nothing. */
  readonly sources: readonly RemoteEngineSource[];
}

/** In the order of the source's `lists` in the plan. */
export interface RemoteEngineSource {
  /** Per pair of memory types; undefined where a pipeline stage has no such memory. */
  readonly lists: readonly (ListPair | undefined)[];
}

/** The local and the remote list of a transfer. */
export interface ListPair {
  readonly local: PreparedList;
  readonly remote: PreparedList;
}

export interface ListTables {
  readonly rank: RankKey;
  readonly local: DescriptorTable;
  readonly remote: DescriptorTable;
  readonly localKey: string;
}

export interface EnginePlan<Engine extends OpenEngine> {
  readonly tables: readonly ListTables[];
  readonly log: LogFields;
  engine(open: OpenEngine, pairs: ReadonlyMap<ListTables, ListPair>): Engine;
}

export interface EngineRequest extends Omit<RemoteRequest, "lease"> {
  readonly lease?: (Pick<RemoteLease, "incarnation"> & Partial<RemoteLease>) | undefined;
}

/** Keeps an engine open until it is released. */
export interface EngineReference<Engine> {
  readonly engine: Engine;
  release(): void;
}

export interface RemoteEnginesOptions<Engine extends OpenEngine> {
  readonly failureType: string;
  readonly role: "prefill" | "decode";
  /** @throws The errors of `buildEngineTransferPlan`: the engine is refused. */
  plan(address: EngineAddress, answer: RemoteRanks): EnginePlan<Engine>;
}

export interface OpenedEngine<Engine extends OpenEngine> {
  readonly engine: Engine | RefusedEngine;
  /** Closes the lists, then the agents. Logs failures. */
  close(): Promise<void>;
}

/**
 * Shakes hands, plans, adds the remote agents and prepares the lists. A failed step undoes the
 * earlier ones. An engine that answers and does not fit is opened for notifications, so that its
 * requests end at once.
 * @throws The errors of the handshake and of the transport.
 */
export async function openEngine<Engine extends OpenEngine>(
  { agent, handshake, local, localLists, log, options, remoteAgents }: PeerContext,
  address: EngineAddress,
  { plan: planEngine, role }: Pick<RemoteEnginesOptions<Engine>, "plan" | "role">,
): Promise<OpenedEngine<Engine>> {
  const { engineId } = address;
  const asked = ranksToAsk(local, address, role);
  const { ranks, refused, ...answer } = await handshake
    .ask(address, asked.tpRanks)
    .catch((error: unknown) => {
      throw asked.refusal ?? error;
    });
  let refusal = asked.refusal ?? refused?.error;
  let plan: EnginePlan<Engine> | undefined;
  try {
    // Both sides count D's tensor-parallel ranks, as vLLM 0.33 does.
    if (role === "prefill") requireOneStage(options.engine, engineId);
    requireSaidDcp(ranks, address);
    if (refusal === undefined) plan = planEngine(address, { ranks, ...answer });
  } catch (error) {
    refusal ??= KvError.from(error, "KV_INTERNAL", `the plan for engine ${engineId}`);
  }
  const agents = new Map<RankKey, string>();
  const pairs = new Map<ListTables, ListPair>();
  const close = async () => {
    const failed = (what: string) => (error: unknown) =>
      log.warn("remote-engine-close-failed", { engineId, what, error: String(error) });
    // An agent cannot be removed while lists name it.
    await Promise.all(
      [...pairs].map(async ([{ localKey }, { remote }]) => {
        await remote.close().catch(failed("remote list"));
        await localLists.release(localKey).catch(failed("local list"));
      }),
    );
    for (const name of agents.values())
      await remoteAgents.remove(name).catch(failed(`agent ${name}`));
  };
  try {
    const owner = `${address.host}:${address.port}`;
    for (const [key, metadata] of refused?.agents ?? agentsOf(ranks))
      agents.set(key, await remoteAgents.add(metadata, owner));
    for (const tables of plan?.tables ?? []) {
      const { rank, localKey, local: table } = tables;
      const remote = await agent.prepareRemote(agents.get(rank) ?? "", tables.remote);
      try {
        pairs.set(tables, { local: await localLists.acquire(localKey, table), remote });
      } catch (error) {
        await remote.close();
        throw error;
      }
    }
  } catch (error) {
    await close();
    throw refusal ?? error;
  }
  const open = { address, ...answer, agents };
  if (plan === undefined) {
    const unplanned = refusal ?? new KvError("KV_INTERNAL", `engine ${engineId} has no plan`);
    return { engine: { ...open, refusal: unplanned, notifiers: asked.notifiers }, close };
  }
  const engine = plan.engine(open, pairs);
  log.info("remote-engine-ready", {
    engineId,
    ranks: [...agents.keys()],
    ...plan.log,
    clockOffsetMs: engine.clock.offsetMs,
    clockRttMs: engine.clock.rttMs,
  });
  return { engine, close };
}

function agentsOf(ranks: RemoteRanks["ranks"]): ReadonlyMap<RankKey, Uint8Array> {
  return new Map(ranks.map(({ geometry, agentMetadata }) => [rankKey(geometry), agentMetadata]));
}

/** @throws `KV_PLAN_UNSUPPORTED`. */
function requireOneStage({ ppSize }: WorkerOptions["engine"], engineId: string): void {
  if (ppSize === 1) return;
  throw new KvError(
    "KV_PLAN_UNSUPPORTED",
    `this engine has ${ppSize} pipeline stages, and engine ${engineId} counts decode workers by tensor-parallel rank: only prefill workers may have stages`,
    { hint: "use pipeline_parallel_size 1 for decode workers" },
  );
}

/** @throws `KV_PLAN_INCOMPATIBLE`. */
function requireSaidDcp(ranks: RemoteRanks["ranks"], { engineId, dcpSize: said }: EngineAddress) {
  for (const { geometry } of ranks) {
    const { dcpSize = 1 } = geometry;
    if (dcpSize === said) continue;
    throw new KvError(
      "KV_PLAN_INCOMPATIBLE",
      `engine ${engineId} has decode context parallelism of ${dcpSize}, and the request says ${said}`,
      {
        hint: "pass dcp_size on with the other kv_transfer_params",
        details: { dcpSize, said },
      },
    );
  }
}

export interface PrefillPlanOptions {
  /**
   * Plans in joint groups with engines that group the layers differently.
   * @default false
   */
  readonly joinsGroups?: boolean | undefined;
  /** False where the other side moves the bytes. @default true */
  readonly preparesLists?: boolean | undefined;
}

/**
 * One rank of D's plan for all ranks of P.
 * @throws `KV_PLAN_UNSUPPORTED`, `KV_TOPOLOGY_INVALID`.
 */
export function planPrefillEngine(
  { local, model, caches, options }: PeerContext,
  { ranks, incarnation }: RemoteRanks,
  { joinsGroups = false, preparesLists = true }: PrefillPlanOptions,
): EnginePlan<RemoteEngine> & Pick<RemoteEngine, "plan"> {
  const remotes = ranks.map(({ geometry }) => geometry);
  const joint = joinsGroups ? joinGroups({ local, remotes, ...model }) : undefined;
  const plan = buildEngineTransferPlan({
    local: joint?.local ?? local,
    remotes: joint?.remotes ?? remotes,
    ...(joint?.model ?? model),
    // A pushing P always converts: D would read its HND blocks as NHD.
    conversions: options.config.enablePermuteLocalKv || !preparesLists ? ["hnd-to-nhd"] : [],
    // A receive pass needs host memory; elsewhere the transfer itself orders the bytes.
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
    plan,
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

/**
 * Prepared lists of local memory, shared where plans divide it equally. The last user closes a
 * list.
 */
export class SharedLocalLists {
  readonly #agent: Agent;
  readonly #lists = new Map<string, { users: number; readonly list: Promise<PreparedList> }>();

  constructor(agent: Agent) {
    this.#agent = agent;
  }

  /** @throws The errors of `Agent.prepareLocal`. */
  async acquire(key: string, table: DescriptorTable): Promise<PreparedList> {
    let entry = this.#lists.get(key);
    if (entry === undefined) {
      entry = { users: 0, list: this.#agent.prepareLocal(table) };
      this.#lists.set(key, entry);
    }
    entry.users += 1;
    try {
      return await entry.list;
    } catch (error) {
      entry.users -= 1;
      if (this.#lists.get(key) === entry) this.#lists.delete(key);
      throw error;
    }
  }

  /** @throws The errors of `PreparedList.close`. */
  async release(key: string): Promise<void> {
    const entry = this.#lists.get(key);
    if (entry === undefined) return;
    entry.users -= 1;
    if (entry.users > 0) return;
    this.#lists.delete(key);
    await (await entry.list).close();
  }

  get size(): number {
    return this.#lists.size;
  }
}

interface RemoteAgentEntry {
  readonly owner: string;
  metadata: Uint8Array;
  users: number;
}

/**
 * Counts users of remote agents: a closing engine and its replacement may share one. An engine
 * cannot take another's agent name to get its notifications.
 */
export class SharedRemoteAgents {
  readonly #agent: Agent;
  readonly #entries = new Map<string, RemoteAgentEntry>();
  /** One addition at a time: only loaded metadata reveals the name. */
  #last: Promise<unknown> = Promise.resolve();

  constructor(agent: Agent) {
    this.#agent = agent;
  }

  /**
   * Returns the agent's name. `owner`: the address that sent the metadata.
   * @throws `KV_AGENT_METADATA_INVALID` when an engine at another address has an agent of that name
   * with other metadata; those of `Agent.addRemote`.
   */
  add(metadata: Uint8Array, owner: string): Promise<string> {
    const added = this.#last.then(() => this.#add(metadata, owner));
    this.#last = added.catch(() => {});
    return added;
  }

  /** @throws The errors of `Agent.removeRemote`. */
  async remove(name: string): Promise<void> {
    const entry = this.#entries.get(name);
    if (entry !== undefined) {
      entry.users -= 1;
      if (entry.users > 0) return;
    }
    this.#entries.delete(name);
    await this.#agent.removeRemote(name);
  }

  get size(): number {
    return this.#entries.size;
  }

  async #add(metadata: Uint8Array, owner: string): Promise<string> {
    const name = await this.#agent.addRemote(metadata);
    const entry = this.#entries.get(name);
    if (entry === undefined) {
      this.#entries.set(name, { owner, metadata, users: 1 });
      return name;
    }
    if (Buffer.compare(entry.metadata, metadata) !== 0) {
      if (entry.owner !== owner) {
        // The transport may have bound the name to the newcomer.
        await this.#agent.addRemote(entry.metadata);
        throw new KvError(
          "KV_AGENT_METADATA_INVALID",
          `the engine at ${owner} names the agent ${name}, which is the agent of the engine at ${entry.owner}`,
          {
            hint: "one of the two is not what it says; set kv_connector_extra_config.handshake_key_file",
          },
        );
      }
      entry.metadata = metadata;
    }
    entry.users += 1;
    return name;
  }
}
