import {
  acquireTraced,
  type EngineAddress,
  type PeerRef,
  type PeerTable,
  type SpanPlace,
  type WorkerContext,
} from "@kv/connector/building-blocks";
import { KvError, type PreparedList } from "@kv/interface";
import { buildEngineTransferPlan, type EngineTransferPlan, type RankGeometry } from "@kv/plan";
import { PUSH_CONTROL, type Registration } from "@kv/protocol";
import { handshakeTargetRanks } from "@kv/topology";

/** The part of a worker's context that links to consumers are built from. */
export type ConsumerLinksContext = Pick<
  WorkerContext,
  "agent" | "local" | "localLists" | "log" | "model" | "remoteAgents"
> & {
  readonly settings: Pick<WorkerContext["settings"], "announcedBlockSize">;
  readonly handshake: Pick<WorkerContext["handshake"], "ask">;
};

/** An open consumer engine that this producer rank writes to. */
export interface ConsumerLink {
  readonly address: EngineAddress;
  /** The consumer's process. Undefined for vLLM, which does not send it. */
  readonly incarnation: string | undefined;
  /** As `Peer.fingerprint`. */
  readonly fingerprint?: string | undefined;
  /** True if the consumer understands `push_withdraw` and `push_ended`. */
  readonly controls: boolean;
  /** The consumer's ranks that this rank serves, by tensor-parallel rank. */
  readonly targets: ReadonlyMap<number, ConsumerTarget>;
}

/** One rank of a consumer engine. */
export interface ConsumerTarget {
  /** The transport's name of the rank's agent. */
  readonly agent: string;
  /**
   * The plan that the consumer would make to READ, with this rank among its sources. The producer executes it in reverse, as WRITEs, so
   * both directions move the same bytes and a proof of one covers the other.
   */
  readonly plan: EngineTransferPlan;
  /** Prepared lists, by the index of the plan's lists. Empty if the consumer takes its heads from another rank: it still expects a done notification from this one. */
  readonly lists: readonly ConsumerLists[];
}

/** The prepared lists of one pair of memory types: this rank's memory and the consumer's. */
export interface ConsumerLists {
  readonly local: PreparedList;
  readonly remote: PreparedList;
}

/** The consumer ranks that a producer rank serves. Errors: `KV_TOPOLOGY_INVALID`. */
export function ranksServed(local: Pick<RankGeometry, "tpRank" | "tpSize">, remoteTpSize: number): number[] {
  return handshakeTargetRanks({ tpRank: local.tpRank, tpSize: local.tpSize, remoteTpSize });
}

const NO_SPANS: SpanPlace = { tracer: undefined, parent: undefined };

/**
 * Acquires the link to the process that sent a registration. A restarted consumer returns under the same engine id, so the open link may
 * belong to the previous process; another handshake then decides. For a vLLM consumer the open link is used unchanged. The caller
 * releases the link. Errors: those of `PeerTable.acquire`; the signal's reason; `KV_GENERATION_STALE` if that process has gone.
 */
export async function acquireConsumer(
  registration: Registration,
  consumers: PeerTable<ConsumerLink>,
  signal?: AbortSignal,
  place: SpanPlace = NO_SPANS,
): Promise<PeerRef<ConsumerLink>> {
  const { engineId, host, port, tpSize, own, wireId } = registration;
  for (let reopened = false; ; reopened = true) {
    const address: EngineAddress = { engineId, host, port, tpSize, dcpSize: 1, ppSize: 1 };
    const reference = await acquireTraced(consumers, address, signal, place);
    if (own === undefined || reference.peer.incarnation === own.incarnation) return reference;
    reference.release();
    if (reopened) {
      throw new KvError(
        "KV_GENERATION_STALE",
        `the process of engine ${engineId} that registered request ${wireId} has gone; another process answers at ${host}:${port}`,
      );
    }
    // Only what answers a handshake at the address replaces the open link, not what this registration says.
    await consumers.renew(reference.peer, signal);
  }
}

/**
 * Opens and closes links to consumers. Errors of `open`: those of the handshake, the plan and the transport; after an error, everything that was opened is
 * closed.
 */
export class ConsumerLinks {
  readonly #context: ConsumerLinksContext;
  /** The keys of the local lists that each target uses. */
  readonly #localListKeys = new WeakMap<ConsumerTarget, string[]>();

  constructor(context: ConsumerLinksContext) {
    this.#context = context;
  }

  /** Performs the handshakes with the consumer's ranks that this rank serves, plans for each, and prepares the lists. */
  async open(address: EngineAddress): Promise<ConsumerLink> {
    const { agent, handshake, local, localLists, log, remoteAgents } = this.#context;
    const { ranks, incarnation, features, fingerprint } = await handshake.ask(
      address,
      ranksServed(local, address.tpSize),
    );
    const controls = features.has(PUSH_CONTROL);
    const plans = ranks.map(({ geometry }) => this.#planOf(geometry, address, controls));
    const targets = new Map<number, ConsumerTarget>();
    const link: ConsumerLink = { address, incarnation, fingerprint, controls, targets };
    try {
      for (const [index, rank] of ranks.entries()) {
        const plan = plans[index] as EngineTransferPlan;
        const name = await remoteAgents.add(rank.agentMetadata, `${address.host}:${address.port}`);
        const lists: ConsumerLists[] = [];
        const keys: string[] = [];
        const target: ConsumerTarget = { agent: name, plan, lists };
        // From here on, `close` removes the agent and the lists that exist.
        targets.set(rank.tpRank, target);
        this.#localListKeys.set(target, keys);
        const source = plan.sources.find(({ remoteRank }) => remoteRank === local.tpRank);
        // The plan is the consumer's: its remote side is this rank.
        for (const { localTable, remoteTable } of source?.lists ?? []) {
          const remote = await agent.prepareRemote(name, localTable);
          const key = `${remoteTable.memoryType} ${remoteTable.rows.join(" ")}`;
          try {
            lists.push({ remote, local: await localLists.acquire(key, () => remoteTable) });
            keys.push(key);
          } catch (error) {
            await remote.close();
            throw error;
          }
        }
      }
    } catch (error) {
      await this.close(link);
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

  #planOf(received: RankGeometry, address: EngineAddress, controls: boolean): EngineTransferPlan {
    const {
      local,
      model,
      settings: { announcedBlockSize },
    } = this.#context;
    if (controls && announcedBlockSize !== undefined && announcedBlockSize !== local.kernelBlockSize) {
      throw new KvError(
        "KV_PLAN_UNSUPPORTED",
        `this engine announces blocks of ${announcedBlockSize} tokens and has blocks of ${local.kernelBlockSize}: engine ${address.engineId} plans with what is announced`,
        {
          hint: "leave push_announced_block_size out: it is for vLLM decode workers, and @kv decode workers need none",
        },
      );
    }
    const geometry = withConvolutionParts(received, local);
    const sources = handshakeTargetRanks({
      tpRank: geometry.tpRank,
      tpSize: address.tpSize,
      remoteTpSize: local.tpSize,
    });
    const isEqual = geometry.kernelBlockSize === local.kernelBlockSize;
    const plan = buildEngineTransferPlan({
      // A vLLM consumer that converts the order inside a head does so after the WRITE: until then its blocks have this rank's order.
      local: controls || isEqual ? geometry : { ...geometry, attentionBackend: local.attentionBackend },
      // Ranks of one engine differ only in their addresses, and only this rank's addresses are used.
      remotes: sources.map((tpRank) => ({ ...local, tpRank })),
      ...model,
      // Must be the consumer's own choice, so that both sides plan the same form.
      canPass: geometry.regions.every(({ memoryType }) => memoryType === "DRAM"),
      // The consumer converts the blocks after the WRITE. Our own consumers refuse conversions that they do not support; vLLM has its own rules.
      conversions: controls ? ["hnd-to-nhd"] : ["hnd-to-nhd", "attention-order"],
      // vLLM makes no pass over blocks of the size that P announced: each byte must land in its place.
      form: controls ? undefined : "direct",
    });
    // Whose blocks are larger than P's, converts them as if P's lay in them one after another; whose are smaller, stops its engine.
    const isTaken = isEqual
      ? plan.form === "copy"
      : plan.form !== "permute" && geometry.kernelBlockSize === announcedBlockSize;
    if (!controls && !isTaken) {
      throw new KvError(
        "KV_PLAN_UNSUPPORTED",
        `engine ${address.engineId} has kernel blocks of ${geometry.kernelBlockSize} tokens and this one of ${local.kernelBlockSize}, and announces ${announcedBlockSize ?? local.kernelBlockSize}: a vLLM 0.33 decode worker stops when such blocks are pushed to it`,
        {
          hint: `set kv_connector_extra_config.push_announced_block_size to ${geometry.kernelBlockSize} here, use equal block sizes, or pull`,
        },
      );
    }
    return plan;
  }

  /** Closes the lists, then removes the agents. Errors are logged. */
  async close({ targets, address }: ConsumerLink): Promise<void> {
    const { localLists, log, remoteAgents } = this.#context;
    const failed = (what: string) => (error: unknown) =>
      log.warn("push-target-close-failed", { engineId: address.engineId, what, error: String(error) });
    // Lists first: an agent cannot be removed while lists refer to it.
    for (const target of targets.values()) {
      for (const { remote } of target.lists) await remote.close().catch(failed("remote list"));
      for (const key of this.#localListKeys.get(target) ?? []) {
        await localLists.release(key).catch(failed("local list"));
      }
    }
    for (const { agent: name } of targets.values()) {
      await remoteAgents.remove(name).catch(failed(`agent ${name}`));
    }
  }
}

/**
 * Adds the division of the convolution state to a consumer's geometry. A handshake contains only the total size, which is enough for a reader.
 * Two engines of one model divide the state in the same way, so this rank's division is scaled to the consumer's size.
 */
function withConvolutionParts(received: RankGeometry, local: RankGeometry): RankGeometry {
  const [theirs, ours] = [received.stateSpace, local.stateSpace];
  if (theirs === undefined || theirs.convProjectionBytes !== undefined) return received;
  if (ours?.convProjectionBytes === undefined || ours.convBytes === 0) return received;
  const { convBytes } = ours;
  const convProjectionBytes = ours.convProjectionBytes.map((bytes) => (bytes * theirs.convBytes) / convBytes);
  if (!convProjectionBytes.every(Number.isInteger)) return received;
  return { ...received, stateSpace: { ...theirs, convProjectionBytes } };
}
