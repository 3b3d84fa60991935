import type { Agent, Log, PreparedList } from "@kv/interface";
import {
  buildEngineTransferPlan,
  type EngineTransferPlan,
  type JointGroups,
  joinGroups,
  type ModelGeometry,
  type RankGeometry,
} from "@kv/plan";
import { handshakeTargetRanks } from "@kv/topology";
import type { ClockOffset } from "../handshake/clock-offset.js";
import type { PeerAddress } from "./peer-table.js";
import { type RankKey, rankKey } from "../handshake/rank-key.js";
import type { LocalLists } from "./local-lists.js";
import type { RemoteAgents } from "./remote-agents.js";

/** A remote engine that a worker can read from: its ranks as agents, the plan, and both sides' lists for each source. */
export interface RemoteLink {
  readonly address: PeerAddress;
  readonly plan: EngineTransferPlan;
  /** Where the remote engine groups the layers differently: its requests are told to the plan in joint groups. */
  readonly joint?: JointGroups;
  readonly clock: ClockOffset;
  /** Which process it is, told by our own peers; they also answer `leases-check`. */
  readonly incarnation: string | undefined;
  /** Notifications of our own that it understands. */
  readonly features: ReadonlySet<string>;
  /** Names of the agents of the ranks that were asked, of every pipeline stage. */
  readonly agents: ReadonlyMap<RankKey, string>;
  /** In the order of `plan.sources`. */
  readonly sources: readonly LinkSource[];
}

/** Prepared lists of one source, by the index of its `lists` in the plan. */
export interface LinkSource {
  /** One per pair of memory types; undefined where a pipeline stage has no memory of that type. */
  readonly lists: readonly (LinkLists | undefined)[];
}

export interface LinkLists {
  readonly local: PreparedList;
  readonly remote: PreparedList;
}

/** What a handshake brought, validated. */
export interface RemoteRanks {
  readonly ranks: readonly RemoteRank[];
  readonly clock: ClockOffset;
  readonly incarnation: string | undefined;
  readonly features: ReadonlySet<string>;
}

export interface RemoteRank {
  readonly tpRank: number;
  readonly geometry: RankGeometry;
  /** The transport's own encoding, for `Agent.addRemote`. */
  readonly agentMetadata: Uint8Array;
}

export interface RemoteLinksOptions {
  readonly agent: Agent;
  readonly log: Log;
  readonly localLists: LocalLists;
  readonly remoteAgents: RemoteAgents;
  /** This rank's cache in the words of a handshake. */
  readonly local: RankGeometry;
  readonly model: ModelGeometry;
  /** As `KvCacheConfig.prefixCaching`. */
  readonly prefixCaching?: boolean;
  readonly conversions: EngineTransferPlan["conversions"];
  /** Engines that group the layers differently are served by joint groups. Default false: the plan refuses them. */
  readonly joinsGroups?: boolean;
  /** False where this side only speaks to the remote engine, and the bytes are the other side's to move. Default true. */
  readonly prepareLists?: boolean;
  shakeHands(address: PeerAddress, tpRanks: readonly number[]): Promise<RemoteRanks>;
}

/**
 * Opens and closes links. `open` shakes hands with the ranks that the topology names, builds the plan, and only then lets the
 * transport know of the peer; what it had made when something fails is undone. Errors: the handshake's, the plan's, the transport's.
 */
export function createRemoteLinks(options: RemoteLinksOptions): {
  open(address: PeerAddress): Promise<RemoteLink>;
  close(link: RemoteLink): Promise<void>;
} {
  const { agent, log, localLists, remoteAgents, local } = options;

  async function open(address: PeerAddress): Promise<RemoteLink> {
    const tpRanks = handshakeTargetRanks({
      tpRank: local.tpRank,
      tpSize: local.tpSize,
      remoteTpSize: address.tpSize,
      dcpSize: local.dcpSize ?? 1,
      remoteDcpSize: address.dcpSize,
    });
    const { ranks, clock, incarnation, features } = await options.shakeHands(address, tpRanks);
    const given = { local, remotes: ranks.map(({ geometry }) => geometry) };
    const joint = options.joinsGroups === true ? joinGroups({ ...given, ...options.model }) : undefined;
    const plan = buildEngineTransferPlan({
      local: joint?.local ?? local,
      remotes: joint?.remotes ?? given.remotes,
      ...(joint?.model ?? options.model),
      conversions: options.conversions,
      // Blocks in device memory can be put in order only by where they land.
      canPass: local.regions.every(({ memoryType }) => memoryType === "DRAM"),
      prefixCaching: options.prefixCaching ?? true,
    });
    const agents = new Map<RankKey, string>();
    const sources: LinkSource[] = [];
    const link: RemoteLink = {
      ...{ address, plan, clock, incarnation, features, agents, sources },
      ...(joint === undefined ? {} : { joint }),
    };
    try {
      for (const rank of ranks)
        agents.set(rankKey(rank.geometry), await remoteAgents.add(rank.agentMetadata));
      for (const source of options.prepareLists === false ? [] : plan.sources) {
        const lists: (LinkLists | undefined)[] = [];
        // Known to the link before it is complete, so that what fails halfway is closed with it.
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
      await close(link);
      throw error;
    }
    log.info("remote-engine-ready", {
      engineId: address.engineId,
      ranks: [...agents.keys()],
      form: plan.form,
      formReason: plan.formReason,
      ...(joint === undefined ? {} : { jointGroups: joint.pairs }),
      conversions: plan.conversions,
      clockOffsetMs: clock.offsetMs,
      clockRttMs: clock.rttMs,
    });
    return link;
  }

  async function close({ plan, agents, sources, address }: RemoteLink): Promise<void> {
    const failed = (what: string) => (error: unknown) =>
      log.warn("remote-engine-close-failed", { engineId: address.engineId, what, error: String(error) });
    // Lists first: an agent that lists name cannot be removed.
    await Promise.all(
      sources.flatMap(({ lists }, index) =>
        lists.map(async (held, list) => {
          if (held === undefined) return;
          await held.remote.close().catch(failed("remote list"));
          const key = plan.sources[index]?.lists[list]?.localListKey;
          if (key !== undefined) await localLists.release(key).catch(failed("local list"));
        }),
      ),
    );
    for (const name of agents.values()) await remoteAgents.remove(name).catch(failed(`agent ${name}`));
  }

  return { open, close };
}
