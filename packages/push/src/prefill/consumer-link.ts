import type { LocalLists, PeerAddress, RemoteAgents, RemoteRanks } from "@kv/connector";
import { type Agent, KvError, type Log, type PreparedList } from "@kv/interface";
import {
  buildEngineTransferPlan,
  type EngineTransferPlan,
  type ModelGeometry,
  type RankGeometry,
} from "@kv/plan";
import { handshakeTargetRanks } from "@kv/topology";
import { consumerGeometry } from "./consumer-geometry.js";
import { PUSH_CONTROL } from "../control.js";

/** A consumer engine that this producer rank writes to. */
export interface WriteLink {
  readonly address: PeerAddress;
  /** Which process it is, told by our own peers. */
  readonly incarnation: string | undefined;
  /** It understands `push_ended`. */
  readonly controls: boolean;
  /** The consumer's ranks that hear from this one, by rank. */
  readonly targets: ReadonlyMap<number, WriteTarget>;
}

export interface WriteTarget {
  readonly agent: string;
  /**
   * The consumer's own plan, as pull would make it, with this rank among its sources: what it would READ is WRITTEN. So both directions
   * move the same bytes, and what is proven of one holds for the other.
   */
  readonly plan: EngineTransferPlan;
  /** By the index of the plan's lists; none where the consumer takes its share of the heads from another rank, and waits for this one's word. */
  readonly lists: readonly { readonly ours: PreparedList; readonly theirs: PreparedList }[];
}

export interface WriteLinksOptions {
  readonly agent: Agent;
  readonly log: Log;
  readonly localLists: LocalLists;
  readonly remoteAgents: RemoteAgents;
  readonly local: RankGeometry;
  readonly model: ModelGeometry;
  shakeHands(address: PeerAddress, tpRanks: readonly number[]): Promise<RemoteRanks>;
}

/** The consumer ranks that a producer rank serves. Errors: `KV_TOPOLOGY_INVALID`. */
export function ranksServed(local: Pick<RankGeometry, "tpRank" | "tpSize">, remoteTpSize: number): number[] {
  return handshakeTargetRanks({ tpRank: local.tpRank, tpSize: local.tpSize, remoteTpSize });
}

/** Opens and closes links. Errors of `open`: the handshake's, the plan's, the transport's; what it had made is undone. */
export function createWriteLinks(options: WriteLinksOptions): {
  open(address: PeerAddress): Promise<WriteLink>;
  close(link: WriteLink): Promise<void>;
} {
  const { agent, log, localLists, remoteAgents, local } = options;
  const keys = new WeakMap<WriteTarget, string[]>();

  async function open(address: PeerAddress): Promise<WriteLink> {
    const { ranks, incarnation, features } = await options.shakeHands(
      address,
      ranksServed(local, address.tpSize),
    );
    const controls = features.has(PUSH_CONTROL);
    const plans = ranks.map(({ geometry }) => planOf(geometry, address, controls));
    const targets = new Map<number, WriteTarget>();
    const link: WriteLink = { address, incarnation, controls, targets };
    try {
      for (const [index, rank] of ranks.entries()) {
        const plan = plans[index] as EngineTransferPlan;
        const name = await remoteAgents.add(rank.agentMetadata);
        const lists: { ours: PreparedList; theirs: PreparedList }[] = [];
        const held: string[] = [];
        const target: WriteTarget = { agent: name, plan, lists };
        // From here on `close` lets go of the agent, and of the lists that are there by then.
        targets.set(rank.tpRank, target);
        keys.set(target, held);
        const source = plan.sources.find(({ remoteRank }) => remoteRank === local.tpRank);
        for (const { localTable, remoteTable } of source?.lists ?? []) {
          const theirs = await agent.prepareRemote(name, localTable);
          const key = `${remoteTable.memoryType} ${remoteTable.rows.join(" ")}`;
          try {
            lists.push({ theirs, ours: await localLists.acquire(key, () => remoteTable) });
            held.push(key);
          } catch (error) {
            await theirs.close();
            throw error;
          }
        }
      }
    } catch (error) {
      await close(link);
      throw error;
    }
    log.info("push-target-ready", {
      engineId: address.engineId,
      ranks: [...targets.keys()],
      form: plans[0]?.form,
      controls,
    });
    return link;
  }

  function planOf(told: RankGeometry, address: PeerAddress, controls: boolean): EngineTransferPlan {
    const geometry = consumerGeometry(told, local);
    const sources = handshakeTargetRanks({
      tpRank: geometry.tpRank,
      tpSize: address.tpSize,
      remoteTpSize: local.tpSize,
    });
    const plan = buildEngineTransferPlan({
      local: geometry,
      // Ranks of one engine are alike but for their addresses, and of those only our own are used.
      remotes: sources.map((tpRank) => ({ ...local, tpRank })),
      ...options.model,
      // As the consumer chooses it for itself: both must come to the same form.
      canPass: geometry.regions.every(({ memoryType }) => memoryType === "DRAM"),
      // What is left to do after the WRITE is the consumer's affair: our own refuses what it does not do, vLLM has its own rules.
      conversions: controls ? ["hnd-to-nhd"] : ["hnd-to-nhd", "attention-order"],
    });
    // Either way round: vLLM turns what it finds in larger blocks, and stops its engine on smaller ones.
    if (!controls && (geometry.kernelBlockSize !== local.kernelBlockSize || plan.form !== "copy")) {
      throw new KvError(
        "KV_PLAN_UNSUPPORTED",
        `engine ${address.engineId} has kernel blocks of ${geometry.kernelBlockSize} tokens and this one of ${local.kernelBlockSize}: a vLLM 0.33 decode worker stops when such blocks are pushed to it`,
        { hint: "use equal block sizes, or pull" },
      );
    }
    return plan;
  }

  async function close({ targets, address }: WriteLink): Promise<void> {
    const failed = (what: string) => (error: unknown) =>
      log.warn("push-target-close-failed", { engineId: address.engineId, what, error: String(error) });
    // Lists first: an agent that lists name cannot be removed.
    for (const target of targets.values()) {
      for (const { theirs } of target.lists) await theirs.close().catch(failed("remote list"));
      for (const key of keys.get(target) ?? []) {
        await localLists.release(key).catch(failed("local list"));
      }
    }
    for (const { agent: name } of targets.values()) {
      await remoteAgents.remove(name).catch(failed(`agent ${name}`));
    }
  }

  return { open, close };
}
