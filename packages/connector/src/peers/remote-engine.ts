import {
  type DescriptorTable,
  KvError,
  type LogFields,
  type PreparedList,
  type SideChannel,
} from "@kv/interface";
import { buildEngineTransferPlan, type EngineTransferPlan, type JointGroups, joinGroups } from "@kv/plan";
import {
  decodeLeaseReply,
  encodeLeaseQuery,
  type LeaseQuery,
  type LeaseReply,
  type RemoteLease,
} from "@kv/protocol";
import { handshakeTargetRanks } from "@kv/topology";
import type { ClockOffset } from "../handshake/clock-offset.js";
import type { RemoteRanks } from "../handshake/connector-handshake.js";
import type { RemoteRequest } from "../scheduler/step-types.js";
import { acquireTraced, endWith } from "../tracing/spans.js";
import type { WorkerContext } from "../worker/worker-context.js";
import { type EngineAddress, type RankKey, rankKey } from "./engine-address.js";
import type { Peer, PeerRef } from "./peer.js";
import { PeerTable } from "./peer-table.js";

/** An engine after a handshake. */
export interface OpenEngine extends Peer {
  /** The remote clock's offset, estimated from the handshake. */
  readonly clock: ClockOffset;
  /** The remote process; undefined for vLLM. A process with an incarnation answers lease queries. */
  readonly incarnation: string | undefined;
  /** Extension messages that the remote engine understands. */
  readonly features: ReadonlySet<string>;
  /** Agent names of the ranks that were asked, of every pipeline stage. */
  readonly agents: ReadonlyMap<RankKey, string>;
}

/** A P, as a rank of D sees it: the plan, and the prepared lists of both sides. */
export interface RemoteEngine extends OpenEngine {
  /** Built once per handshake. */
  readonly plan: EngineTransferPlan;
  /** Set when the remote engine groups the layers differently. Requests are then planned in joint groups. */
  readonly joint?: JointGroups | undefined;
  /** Prepared lists per source, in the order of `plan.sources`; empty where this side transfers nothing. */
  readonly sources: readonly RemoteEngineSource[];
}

/** Prepared lists of one source, in the order of the source's `lists` in the plan. */
export interface RemoteEngineSource {
  /** One per pair of memory types; undefined where a pipeline stage has no memory of that type. */
  readonly lists: readonly (ListPair | undefined)[];
}

/** The local and the remote list of a transfer. */
export interface ListPair {
  /** This rank's memory. */
  readonly local: PreparedList;
  /** The remote rank's memory. */
  readonly remote: PreparedList;
}

/** A pair of lists before it is prepared. */
export interface ListTables {
  /** The remote rank. */
  readonly rank: RankKey;
  /** This rank's memory. */
  readonly local: DescriptorTable;
  /** The remote rank's memory. */
  readonly remote: DescriptorTable;
  /** Engines with the same key share the local list. */
  readonly localKey: string;
}

/** What is transferred with an engine that has answered a handshake. */
export interface EnginePlan<Engine extends OpenEngine> {
  /** The lists that this rank transfers with. */
  readonly tables: readonly ListTables[];
  /** What the log says of the engine. */
  readonly log: LogFields;
  /** The engine, once its agents are added and its lists prepared. */
  engine(open: OpenEngine, pairs: ReadonlyMap<ListTables, ListPair>): Engine;
}

/** A request, and the process of the remote engine that it names. */
export interface EngineRequest extends Omit<RemoteRequest, "lease"> {
  /** The process; undefined where that is vLLM. */
  readonly lease?: (Pick<RemoteLease, "incarnation"> & Partial<RemoteLease>) | undefined;
}

/** How a worker uses remote engines. */
export interface RemoteEnginesOptions<Engine extends OpenEngine> {
  /** vLLM's name of a failed handshake, for the log. */
  readonly failureType: string;
  /** What the remote engines do with the requests. A P of `@kv` answers lease queries. */
  readonly role: "prefill" | "decode";
  /** Plans once per handshake. Errors: `KV_PLAN_UNSUPPORTED` for a pair that does not fit. */
  plan(address: EngineAddress, answer: RemoteRanks): EnginePlan<Engine>;
}

/**
 * The remote engines of a worker. `acquire` shakes hands with the ranks that the topology names, plans, adds the remote
 * agents and prepares the lists. When a step fails, it undoes the earlier ones.
 */
export class RemoteEngines<Engine extends OpenEngine = RemoteEngine> {
  /** The engines by address. */
  readonly table: PeerTable<Engine>;
  readonly #context: WorkerContext;
  readonly #options: RemoteEnginesOptions<Engine>;
  /** The lists of each open engine, and the keys of their local ones. */
  readonly #lists = new WeakMap<OpenEngine, readonly OpenList[]>();

  constructor(context: WorkerContext, options: RemoteEnginesOptions<Engine>) {
    this.#context = context;
    this.#options = options;
    this.table = new PeerTable<Engine>({
      clock: context.clock,
      log: context.log,
      metrics: context.metrics,
      engineTtlMs: context.settings.engineTtlMs,
      failureType: options.failureType,
      open: (address) => this.#open(address),
      close: (engine) => this.#close(engine, this.#lists.get(engine) ?? []),
    });
  }

  /**
   * Returns the engine, if it is still the process that the request names. Requests and open engines can both outlive that process.
   * A request that names a process is not served by an engine that does not: it could not be asked for the lease. Records a span of the handshake, unless
   * `isTraced` is false. Errors: those of the handshake, the plan and the transport; `KV_HANDSHAKE_BACKED_OFF`; `KV_GENERATION_STALE` when the process is
   * gone; the signal's reason.
   */
  async acquire(request: EngineRequest, signal?: AbortSignal, isTraced = true): Promise<PeerRef<Engine>> {
    const { role } = this.#options;
    const place = { tracer: isTraced ? this.#context.tracer : undefined, parent: request.traceparent };
    for (let isSecondTry = false; ; isSecondTry = true) {
      const reference = await acquireTraced(this.table, request, signal, place);
      const { peer } = reference;
      if (isMeant(peer, request)) return reference;
      reference.release();
      if (isSecondTry) throw staleError(request, role);
      // A lease query is cheaper than a handshake. vLLM's listener would stop at one.
      if (role === "prefill" && peer.incarnation !== undefined) {
        const { incarnation } = await this.queryLease(request, signal);
        if (incarnation === peer.incarnation) throw staleError(request, role);
      }
      // Only what answers a handshake at the address replaces the open engine, not what this request says.
      await this.table.renew(peer, signal);
    }
  }

  /** Asks the process at the request's address whether it holds the request's blocks. Errors: as `queryLease`. */
  queryLease(request: EngineRequest, signal?: AbortSignal): Promise<LeaseReply> {
    const { engineId, requestId, host, port, lease, blocks, prompt, traceparent } = request;
    const { sideChannel, settings, tracer } = this.#context;
    const span = tracer?.start("kv.lease_query", { parent: traceparent, kind: "client" });
    return endWith(
      span,
      queryLease(
        {
          engineId,
          requestId,
          generation: lease?.generation,
          capability: lease?.capability,
          blocks,
          prompt,
        },
        { sideChannel, host, port, timeoutMs: settings.handshakeTimeoutMs, signal },
      ),
    );
  }

  /**
   * Sends notifications about a request to the process that prefilled it, in the background. `send` is called once the engine is open, unless
   * another process has its address. `failed` gets the error of the handshake or of `send`.
   */
  notify(
    request: RemoteRequest,
    send: (engine: Engine) => void,
    failed: (error: unknown) => void,
  ): Promise<void> {
    return this.table
      .acquire(request)
      .then((reference) => {
        try {
          if (isMeant(reference.peer, request)) send(reference.peer);
        } finally {
          reference.release();
        }
      })
      .catch(failed);
  }

  async #open(address: EngineAddress): Promise<Engine> {
    const { agent, handshake, local, localLists, log, remoteAgents } = this.#context;
    const tpRanks = handshakeTargetRanks({
      tpRank: local.tpRank,
      tpSize: local.tpSize,
      remoteTpSize: address.tpSize,
      dcpSize: local.dcpSize ?? 1,
      remoteDcpSize: address.dcpSize,
    });
    const { ranks, ...answer } = await handshake.ask(address, tpRanks);
    const plan = this.#options.plan(address, { ranks, ...answer });
    const agents = new Map<RankKey, string>();
    const open: OpenEngine = { address, ...answer, agents };
    const lists: OpenList[] = [];
    const pairs = new Map<ListTables, ListPair>();
    try {
      const owner = `${address.host}:${address.port}`;
      for (const rank of ranks)
        agents.set(rankKey(rank.geometry), await remoteAgents.add(rank.agentMetadata, owner));
      for (const tables of plan.tables) {
        const { rank, localKey } = tables;
        const remote = await agent.prepareRemote(agents.get(rank) ?? "", tables.remote);
        try {
          const local = await localLists.acquire(localKey, () => tables.local);
          pairs.set(tables, { local, remote });
          lists.push({ remote, localKey });
        } catch (error) {
          await remote.close();
          throw error;
        }
      }
    } catch (error) {
      await this.#close(open, lists);
      throw error;
    }
    const engine = plan.engine(open, pairs);
    this.#lists.set(engine, lists);
    log.info("remote-engine-ready", {
      engineId: address.engineId,
      ranks: [...agents.keys()],
      ...plan.log,
      clockOffsetMs: open.clock.offsetMs,
      clockRttMs: open.clock.rttMs,
    });
    return engine;
  }

  async #close({ agents, address }: OpenEngine, lists: readonly OpenList[]): Promise<void> {
    const { localLists, log, remoteAgents } = this.#context;
    const failed = (what: string) => (error: unknown) =>
      log.warn("remote-engine-close-failed", { engineId: address.engineId, what, error: String(error) });
    // Lists first: an agent cannot be removed while lists name it.
    await Promise.all(
      lists.map(async ({ remote, localKey }) => {
        await remote.close().catch(failed("remote list"));
        await localLists.release(localKey).catch(failed("local list"));
      }),
    );
    for (const name of agents.values()) await remoteAgents.remove(name).catch(failed(`agent ${name}`));
  }
}

interface OpenList {
  readonly remote: PreparedList;
  readonly localKey: string;
}

/** How D uses the P's of its requests. */
export interface PrefillEnginesOptions {
  /** vLLM's name of a failed handshake, for the log. */
  readonly failureType: string;
  /** Supports engines that group the layers differently, with joint groups. Default false: the plan refuses them. */
  readonly joinsGroups?: boolean | undefined;
  /** False where the other side moves the bytes and this side only notifies. Default true. */
  readonly preparesLists?: boolean | undefined;
}

/** The P's of a worker of D. One plan is for all ranks of a P. */
export function prefillEngines(
  context: WorkerContext,
  { failureType, joinsGroups = false, preparesLists = true }: PrefillEnginesOptions,
): RemoteEngines {
  const { local, model, caches, options } = context;
  return new RemoteEngines(context, {
    failureType,
    role: "prefill",
    plan(_, { ranks, incarnation }) {
      const remotes = ranks.map(({ geometry }) => geometry);
      const joint = joinsGroups ? joinGroups({ local, remotes, ...model }) : undefined;
      const plan = buildEngineTransferPlan({
        local: joint?.local ?? local,
        remotes: joint?.remotes ?? remotes,
        ...(joint?.model ?? model),
        // A P that pushes always plans with this conversion. This side must plan the same, or it would read P's HND blocks as NHD.
        conversions: options.config.enablePermuteLocalKv || !preparesLists ? ["hnd-to-nhd"] : [],
        // A receive pass needs host memory. In device memory, the transfer itself must put the bytes in order.
        canPass: local.regions.every(({ memoryType }) => memoryType === "DRAM"),
        prefixCaching: caches.config.prefixCaching ?? true,
      });
      const sources = (preparesLists ? plan.sources : []).map(({ lists, remotePpRank, remoteRank }) =>
        lists.map(({ localListKey, localTable, remoteTable }): ListTables | undefined =>
          remoteTable.rows.length === 0
            ? undefined
            : {
                rank: rankKey({ ppRank: remotePpRank, tpRank: remoteRank }),
                ...{ local: localTable, remote: remoteTable, localKey: localListKey },
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
          ...{ ...open, plan, joint },
          sources: sources.map((lists) => ({ lists: lists.map((tables) => tables && pairs.get(tables)) })),
        }),
      };
    },
  });
}

/** Whether the engine is the process that the request names. Requests of vLLM name no process. */
function isMeant({ incarnation }: OpenEngine, { lease }: EngineRequest): boolean {
  return lease === undefined || incarnation === lease.incarnation;
}

function staleError({ engineId, requestId, host, port }: EngineRequest, role: "prefill" | "decode"): KvError {
  const another = `another process answers at ${host}:${port}`;
  if (role === "decode") {
    return new KvError(
      "KV_GENERATION_STALE",
      `the process of engine ${engineId} that registered request ${requestId} has gone; ${another}`,
    );
  }
  return new KvError(
    "KV_GENERATION_STALE",
    `request ${requestId} was prefilled by an engine ${engineId} that is gone; ${another}`,
    {
      hint: "send the prompt to a prefill worker again",
      details: { engineId, requestId, host, port },
    },
  );
}

/** Options of `queryLease`. */
export interface QueryLeaseOptions {
  readonly sideChannel: SideChannel;
  /** Host of P's side channel. */
  readonly host: string;
  /** Port of P's side channel. */
  readonly port: number;
  /** Timeout of each of the two attempts. */
  readonly timeoutMs: number;
  readonly signal?: AbortSignal | undefined;
}

/**
 * Asks P whether it still holds a request's blocks. Asks again once when the first query or its reply is lost. Errors: those of
 * `SideChannel.request`; `KV_WIRE_MALFORMED` for a malformed reply.
 */
export async function queryLease(query: LeaseQuery, options: QueryLeaseOptions): Promise<LeaseReply> {
  const { sideChannel, host, port, timeoutMs, signal } = options;
  for (let isSecondTry = false; ; isSecondTry = true) {
    try {
      const { frames } = await sideChannel.request({
        host,
        port,
        frames: [encodeLeaseQuery(query)],
        timeoutMs,
        signal,
      });
      const reply = decodeLeaseReply(frames);
      if (reply !== undefined) return reply;
      throw new KvError(
        "KV_WIRE_MALFORMED",
        `engine ${query.engineId} at ${host}:${port} answered a lease query with ${frames.length} frames that are not a lease reply`,
      );
    } catch (error) {
      if (isSecondTry || signal?.aborted) throw error;
    }
  }
}
