import { KvError } from "@kv/interface";
import type { EngineTransferPlan, RankGeometry } from "@kv/plan";
import { checkedSide, vllmLimitOf } from "@kv/plan/vllm";
import type { Pair } from "../input/pair.js";
import { byStage, placeOf } from "../input/pipeline-stages.js";
import type { RankReport, StageReport } from "./report.js";

/** The prefill rank of a plan's source or read. Errors: `KV_INTERNAL` for a rank that is not in the pair. */
export function prefillRank(
  pair: Pick<Pair, "prefill">,
  { remoteRank, remotePpRank }: { readonly remoteRank: number; readonly remotePpRank: number },
): RankGeometry {
  const found = pair.prefill.find(
    (rank) => rank.tpRank === remoteRank && placeOf(rank).ppRank === remotePpRank,
  );
  if (found !== undefined) return found;
  throw new KvError(
    "KV_INTERNAL",
    `the plan reads rank ${remoteRank} of stage ${remotePpRank}, which is not in the pair`,
  );
}

/** The caches of each prefill stage, by the sources of the plans, and the ranks that read them. */
export function stageReports(
  pair: Pair,
  plans: readonly EngineTransferPlan[],
  ranks: readonly RankReport[],
): readonly StageReport[] {
  const regionsOf = new Map<number, Set<number>>();
  for (const plan of plans) {
    for (const { remotePpRank, segments } of plan.sources) {
      const regions = regionsOf.get(remotePpRank) ?? new Set();
      for (const segment of segments) {
        const region = plan.segments[segment]?.region;
        if (region !== undefined) regions.add(region);
      }
      regionsOf.set(remotePpRank, regions);
    }
  }
  const names = pair.decode[0]?.regions.map(({ name }) => name) ?? [];
  return [...byStage(pair.prefill).keys()].map((stage): StageReport => {
    const reads = ranks.flatMap((rank) =>
      rank.reads.flatMap(({ prefillStage, prefillRank: from }) =>
        prefillStage === stage ? [{ from, by: rank.decodeRank }] : [],
      ),
    );
    const ascending = (numbers: readonly number[]) => [...new Set(numbers)].sort((a, b) => a - b);
    return {
      stage,
      regions: ascending([...(regionsOf.get(stage) ?? [])]).flatMap((region) => names[region] ?? []),
      read: ascending(reads.map(({ from }) => from)),
      readers: ascending(reads.map(({ by }) => by)),
    };
  });
}

/** Why vLLM's decode worker (0.33) refuses a pair that has a plan, by the table of vLLM's checks; its handshake counts the regions of each rank. */
export function refusedByVllm(pair: Pair): readonly string[] {
  const stages = byStage(pair.prefill).length;
  if (stages > 1)
    return [
      `prefill has ${stages} pipeline stages: the handshake ends with "Number of KV layers must match between prefill and decode" (0.33); a decode worker of @kv/pull reads them`,
    ];
  const [prefill, decode] = [pair.prefill[0], pair.decode[0]];
  if (prefill === undefined || decode === undefined) return [];
  const limit = vllmLimitOf(
    {
      ...{ local: checkedSide(decode), remote: checkedSide(prefill), model: pair },
      hasStates: decode.stateSpace !== undefined,
      mode: "pull",
      checking: "decode",
    },
    "0.33.0",
  );
  return limit === undefined ? [] : [`${limit.text} (0.33): ${limit.fix}`];
}
