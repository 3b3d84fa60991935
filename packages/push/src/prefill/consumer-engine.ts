import {
  type ListPair,
  type OpenEngine,
  RemoteEngines,
  rankKey,
  type WorkerContext,
} from "@kv/connector/building-blocks";
import { KvError } from "@kv/interface";
import { buildEngineTransferPlan, type EngineTransferPlan, type RankGeometry } from "@kv/plan";
import { PUSH_CONTROL } from "@kv/protocol";
import { handshakeTargetRanks } from "@kv/topology";

/** A D, as a rank of P sees it. */
export interface ConsumerEngine extends OpenEngine {
  /** The consumer's ranks that this rank serves, by tensor-parallel rank. */
  readonly targets: ReadonlyMap<number, ConsumerTarget>;
}

/** One rank of a consumer engine. */
export interface ConsumerTarget {
  readonly agent: string;
  /**
   * The plan that the consumer would make to READ, with this rank among its sources. The producer
   * executes it in reverse, as WRITEs, so both directions move the same bytes and a proof of one
   * covers the other.
   */
  readonly plan: EngineTransferPlan;
  /**
   * Prepared lists, by the index of the plan's lists. Empty if the consumer takes its heads from
   * another rank: it still expects a done notification from this one.
   */
  readonly lists: readonly (ListPair | undefined)[];
}

/** The consumers of a worker of P. Each rank of a consumer has a plan of its own. */
export function consumerEngines(context: WorkerContext): RemoteEngines<ConsumerEngine> {
  const { local } = context;
  return new RemoteEngines(context, {
    failureType: "handshake_setup_failed",
    role: "decode",
    plan(address, { ranks, features }) {
      const controls = features.has(PUSH_CONTROL);
      const targets = ranks.map(({ tpRank, geometry }) => {
        const plan = planOf(context, geometry, address, controls);
        const source = plan.sources.find(({ remoteRank }) => remoteRank === local.tpRank);
        // The plan is the consumer's: its remote side is this rank.
        const tables = (source?.lists ?? []).map(({ localTable, remoteTable }) => ({
          rank: rankKey(geometry),
          local: remoteTable,
          remote: localTable,
          localKey: `${remoteTable.memoryType} ${remoteTable.rows.join(" ")}`,
        }));
        return { tpRank, rank: rankKey(geometry), plan, tables };
      });
      return {
        tables: targets.flatMap(({ tables }) => tables),
        log: { form: targets[0]?.plan.form, controls },
        engine: (open, pairs) => ({
          ...open,
          targets: new Map(
            targets.map(({ tpRank, rank, plan, tables }) => [
              tpRank,
              {
                agent: open.agents.get(rank) ?? "",
                plan,
                lists: tables.map((each) => pairs.get(each)),
              },
            ]),
          ),
        }),
      };
    },
  });
}

/**
 * Plans what a rank of the consumer would plan to READ.
 * @throws `KV_PLAN_UNSUPPORTED`, `KV_TOPOLOGY_INVALID`.
 */
function planOf(
  { local, model, settings: { announcedBlockSize } }: WorkerContext,
  received: RankGeometry,
  { engineId, tpSize, dcpSize }: OpenEngine["address"],
  controls: boolean,
): EngineTransferPlan {
  if (!controls && (local.dcpSize ?? 1) > 1) {
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `this engine has decode context parallelism of ${local.dcpSize}, and engine ${engineId} is a vLLM: it takes no pushed blocks then`,
      {
        hint: "use NixlConnector (pull) on both sides: vLLM 0.33 pushes without --decode-context-parallel-size only",
      },
    );
  }
  if (
    controls &&
    announcedBlockSize !== undefined &&
    announcedBlockSize !== local.kernelBlockSize
  ) {
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `this engine announces blocks of ${announcedBlockSize} tokens and has blocks of ${local.kernelBlockSize}: engine ${engineId} plans with what is announced`,
      {
        hint: "leave push_announced_block_size out: it is for vLLM decode workers, and @kv decode workers need none",
      },
    );
  }
  const { ppSize = 1, ppRank } = local;
  const geometry = {
    ...withConvolutionParts(received, local),
    // The blocks of a group of which this stage has no layer are another stage's to write.
    ...(ppSize === 1 ? {} : { ppSize, ppRank }),
  };
  const sources = handshakeTargetRanks({
    tpRank: geometry.tpRank,
    tpSize,
    dcpSize,
    remoteTpSize: local.tpSize,
    remoteDcpSize: local.dcpSize,
  });
  const isEqual = geometry.kernelBlockSize === local.kernelBlockSize;
  const plan = buildEngineTransferPlan({
    // A vLLM consumer that converts the order inside a head does so after the WRITE: until then its
    // blocks have this rank's order.
    local:
      controls || isEqual ? geometry : { ...geometry, attentionBackend: local.attentionBackend },
    // Ranks of one stage differ only in their addresses, and only this rank's addresses are used.
    // The consumer's geometry has this stage's layers only.
    remotes: sources.map((tpRank) => ({ ...local, ppRank: 0, ppSize: 1, tpRank })),
    ...model,
    // Must be the consumer's own choice, so that both sides plan the same form.
    canPass: geometry.regions.every(({ memoryType }) => memoryType === "DRAM"),
    // The consumer converts the blocks after the WRITE. Our own consumers refuse conversions that
    // they do not support; vLLM has its own rules.
    conversions: controls ? ["hnd-to-nhd"] : ["hnd-to-nhd", "attention-order"],
    // vLLM makes no pass over blocks of the size that P announced: each byte must land in its
    // place.
    form: controls ? undefined : "direct",
  });
  // Whose blocks are larger than P's, converts them as if P's lay in them one after another; whose
  // are smaller, stops its engine.
  const isTaken = isEqual
    ? plan.form === "copy"
    : plan.form !== "permute" && geometry.kernelBlockSize === announcedBlockSize;
  if (!controls && !isTaken) {
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `engine ${engineId} has kernel blocks of ${geometry.kernelBlockSize} tokens and this one of ${local.kernelBlockSize}, and announces ${announcedBlockSize ?? local.kernelBlockSize}: a vLLM 0.33 decode worker stops when such blocks are pushed to it`,
      {
        hint: `set kv_connector_extra_config.push_announced_block_size to ${geometry.kernelBlockSize} here, use equal block sizes, or pull`,
      },
    );
  }
  return plan;
}

/**
 * Adds the division of the convolution state to a consumer's geometry. A handshake contains only
 * the total size, which is enough for a reader. Two engines of one model divide the state in the
 * same way, so this rank's division is scaled to the consumer's size.
 */
function withConvolutionParts(received: RankGeometry, local: RankGeometry): RankGeometry {
  const [theirs, ours] = [received.stateSpace, local.stateSpace];
  if (theirs === undefined || theirs.convProjectionBytes !== undefined) return received;
  if (ours?.convProjectionBytes === undefined || ours.convBytes === 0) return received;
  const { convBytes } = ours;
  const convProjectionBytes = ours.convProjectionBytes.map(
    (bytes) => (bytes * theirs.convBytes) / convBytes,
  );
  if (!convProjectionBytes.every(Number.isInteger)) return received;
  return { ...received, stateSpace: { ...theirs, convProjectionBytes } };
}
