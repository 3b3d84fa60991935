import { KvError, type PreparedList } from "@kv/interface";
import { buildEngineTransferPlan, type EngineTransferPlan, type JointGroups, joinGroups } from "@kv/plan";
import type { LeaseReply } from "@kv/protocol";
import { handshakeTargetRanks } from "@kv/topology";
import type { ClockOffset } from "../handshake/clock-offset.js";
import { queryLease } from "../handshake/lease-query.js";
import { type RankKey, rankKey } from "../handshake/rank-key.js";
import type { RemoteRequest } from "../scheduler/step-types.js";
import { acquireTraced, endWith } from "../tracing/spans.js";
import type { WorkerContext } from "../worker/worker-context.js";
import type { EngineAddress } from "./engine-address.js";
import type { Peer, PeerRef } from "./peer.js";
import { PeerTable } from "./peer-table.js";

/** A remote engine after a handshake: the agents of its ranks, the plan, and the prepared lists of both sides. */
export interface RemoteEngine extends Peer {
  /** Built once per handshake. */
  readonly plan: EngineTransferPlan;
  /** Set when the remote engine groups the layers differently. Requests are then planned in joint groups. */
  readonly joint?: JointGroups | undefined;
  /** The remote clock's offset, estimated from the handshake. */
  readonly clock: ClockOffset;
  /** The remote process; undefined for vLLM. A process with an incarnation answers lease queries. */
  readonly incarnation: string | undefined;
  /** Extension messages that the remote engine understands. */
  readonly features: ReadonlySet<string>;
  /** Agent names of the ranks that were asked, of every pipeline stage. */
  readonly agents: ReadonlyMap<RankKey, string>;
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

/** How a worker uses remote engines. */
export interface RemoteEnginesOptions {
  /** vLLM's name of a failed handshake, for the log. */
  readonly failureType: string;
  /** Supports engines that group the layers differently, with joint groups. Default false: the plan refuses them. */
  readonly joinsGroups?: boolean | undefined;
  /** False where the other side moves the bytes and this side only notifies. Default true. */
  readonly preparesLists?: boolean | undefined;
}

/**
 * The remote engines of a worker. `acquire` shakes hands with the ranks that the topology names, builds the plan, adds the remote
 * agents and prepares the lists. When a step fails, it undoes the earlier ones.
 */
export class RemoteEngines {
  /** The engines by address. */
  readonly table: PeerTable<RemoteEngine>;
  readonly #context: WorkerContext;
  readonly #options: RemoteEnginesOptions;

  constructor(context: WorkerContext, options: RemoteEnginesOptions) {
    this.#context = context;
    this.#options = options;
    this.table = new PeerTable<RemoteEngine>({
      clock: context.clock,
      log: context.log,
      metrics: context.metrics,
      engineTtlMs: context.settings.engineTtlMs,
      failureType: options.failureType,
      open: (address) => this.#open(address),
      close: (engine) => this.#close(engine),
    });
  }

  /**
   * Returns the engine, if it is still the process that prefilled the request. Parameters and open engines can both outlive that process.
   * A request whose parameters name a process is not served by an engine that does not: it could not be asked for the lease. Errors: those of the handshake, the plan and the transport; `KV_HANDSHAKE_BACKED_OFF`; `KV_GENERATION_STALE` when the process is
   * gone; the signal's reason.
   */
  async acquire(request: RemoteRequest, signal: AbortSignal): Promise<PeerRef<RemoteEngine>> {
    for (let isSecondTry = false; ; isSecondTry = true) {
      const reference = await acquireTraced(this.table, request, signal, {
        tracer: this.#context.tracer,
        parent: request.traceparent,
      });
      const { peer } = reference;
      if (isMeant(peer, request)) return reference;
      reference.release();
      if (isSecondTry) throw staleError(request);
      // A lease query is cheaper than a handshake. vLLM's listener would stop at one.
      if (peer.incarnation !== undefined) {
        const { incarnation } = await this.queryLease(request, signal);
        if (incarnation === peer.incarnation) throw staleError(request);
      }
      // Only what answers a handshake at the address replaces the open engine, not what this request says.
      await this.table.renew(peer, signal);
    }
  }

  /** Asks the process at the request's address whether it holds the request's blocks. Errors: as `queryLease`. */
  queryLease(request: RemoteRequest, signal: AbortSignal): Promise<LeaseReply> {
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
    send: (engine: RemoteEngine) => void,
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

  async #open(address: EngineAddress): Promise<RemoteEngine> {
    const { agent, handshake, local, localLists, log, model, remoteAgents } = this.#context;
    const { caches, options } = this.#context;
    const tpRanks = handshakeTargetRanks({
      tpRank: local.tpRank,
      tpSize: local.tpSize,
      remoteTpSize: address.tpSize,
      dcpSize: local.dcpSize ?? 1,
      remoteDcpSize: address.dcpSize,
    });
    const { ranks, clock, incarnation, features, registrationGeneration, fingerprint } = await handshake.ask(
      address,
      tpRanks,
    );
    const remotes = ranks.map(({ geometry }) => geometry);
    const joint = this.#options.joinsGroups === true ? joinGroups({ local, remotes, ...model }) : undefined;
    const plan = buildEngineTransferPlan({
      local: joint?.local ?? local,
      remotes: joint?.remotes ?? remotes,
      ...(joint?.model ?? model),
      // A P that pushes always plans with this conversion. This side must plan the same, or it would read P's HND blocks as NHD.
      conversions:
        options.config.enablePermuteLocalKv || this.#options.preparesLists === false ? ["hnd-to-nhd"] : [],
      // A receive pass needs host memory. In device memory, the transfer itself must put the bytes in order.
      canPass: local.regions.every(({ memoryType }) => memoryType === "DRAM"),
      prefixCaching: caches.config.prefixCaching ?? true,
    });
    const owner = `${address.host}:${address.port}`;
    const agents = new Map<RankKey, string>();
    const sources: { lists: (ListPair | undefined)[] }[] = [];
    const engine: RemoteEngine = {
      address,
      plan,
      joint,
      clock,
      incarnation,
      features,
      registrationGeneration,
      fingerprint,
      agents,
      sources,
    };
    try {
      for (const rank of ranks)
        agents.set(rankKey(rank.geometry), await remoteAgents.add(rank.agentMetadata, owner));
      for (const source of this.#options.preparesLists === false ? [] : plan.sources) {
        const lists: (ListPair | undefined)[] = [];
        // Added to the engine before it is complete, so that a failure closes the lists that exist.
        sources.push({ lists });
        const name = agents.get(rankKey({ ppRank: source.remotePpRank, tpRank: source.remoteRank })) ?? "";
        for (const list of source.lists) {
          if (list.remoteTable.rows.length === 0) {
            lists.push(undefined);
            continue;
          }
          const remote = await agent.prepareRemote(name, list.remoteTable);
          try {
            lists.push({
              remote,
              local: await localLists.acquire(list.localListKey, () => list.localTable),
            });
          } catch (error) {
            await remote.close();
            throw error;
          }
        }
      }
    } catch (error) {
      await this.#close(engine);
      throw error;
    }
    log.info("remote-engine-ready", {
      engineId: address.engineId,
      ranks: [...agents.keys()],
      form: plan.form,
      formReason: plan.formReason,
      comparesPrompts: incarnation !== undefined,
      ...(joint === undefined ? {} : { jointGroups: joint.pairs }),
      conversions: plan.conversions,
      clockOffsetMs: clock.offsetMs,
      clockRttMs: clock.rttMs,
    });
    return engine;
  }

  async #close({ plan, agents, sources, address }: RemoteEngine): Promise<void> {
    const { localLists, log, remoteAgents } = this.#context;
    const failed = (what: string) => (error: unknown) =>
      log.warn("remote-engine-close-failed", { engineId: address.engineId, what, error: String(error) });
    // Lists first: an agent cannot be removed while lists name it.
    await Promise.all(
      sources.flatMap(({ lists }, source) =>
        lists.map(async (pair, list) => {
          if (pair === undefined) return;
          await pair.remote.close().catch(failed("remote list"));
          const key = plan.sources[source]?.lists[list]?.localListKey;
          if (key !== undefined) await localLists.release(key).catch(failed("local list"));
        }),
      ),
    );
    for (const name of agents.values()) await remoteAgents.remove(name).catch(failed(`agent ${name}`));
  }
}

/** Whether the engine is the process that created the request's parameters. Parameters of vLLM name no process. */
function isMeant({ incarnation }: RemoteEngine, { lease }: RemoteRequest): boolean {
  return lease === undefined || incarnation === lease.incarnation;
}

function staleError(request: RemoteRequest): KvError {
  const { engineId, requestId, host, port } = request;
  return new KvError(
    "KV_GENERATION_STALE",
    `request ${requestId} was prefilled by an engine ${engineId} that is gone; another process answers at ${host}:${port}`,
    {
      hint: "send the prompt to a prefill worker again",
      details: { engineId, requestId, host, port },
    },
  );
}
