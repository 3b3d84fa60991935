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
  /** The D ranks that this rank serves, by tensor-parallel rank. */
  readonly targets: ReadonlyMap<number, ConsumerTarget>;
}

export interface ConsumerTarget {
  readonly agent: string;
  /**
   * The plan that D would READ with. P runs it in reverse, so both directions move the same bytes.
   */
  readonly plan: EngineTransferPlan;
  /**
   * In the order of the plan's lists. Empty if D takes its heads from another rank; it still
   * expects a done notification.
   */
  readonly lists: readonly (ListPair | undefined)[];
}

/** The D's of a worker of P. Each rank of a D has its own plan. */
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

/** @throws `KV_PLAN_UNSUPPORTED`, `KV_TOPOLOGY_INVALID`. */
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
    // Another stage writes the groups that have no layer here.
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
    // A vLLM D converts the order inside a head after the WRITE.
    local:
      controls || isEqual ? geometry : { ...geometry, attentionBackend: local.attentionBackend },
    // A stage's ranks differ only in addresses, and only this rank's are used.
    remotes: sources.map((tpRank) => ({ ...local, ppRank: 0, ppSize: 1, tpRank })),
    ...model,
    // D must choose the same form.
    canPass: geometry.regions.every(({ memoryType }) => memoryType === "DRAM"),
    // An `@kv` D refuses unsupported conversions itself; vLLM has other rules.
    conversions: controls ? ["hnd-to-nhd"] : ["hnd-to-nhd", "attention-order"],
    // vLLM makes no pass over blocks of P's announced size, so each byte must land in its place.
    form: controls ? undefined : "direct",
  });
  // A vLLM D with larger blocks converts them as if P's lay in them one after another. With smaller
  // blocks, it stops its engine.
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
 * A handshake has only the convolution state's total size. Engines of one model divide it alike, so
 * this rank's division is scaled.
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
