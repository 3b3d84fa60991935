import { buildEngineTransferPlan, type EngineTransferPlan, type ReceiveConversion } from "@kv/plan";
import { handshakeTargetRanks } from "@kv/topology";
import type { Pair } from "../input/pair.js";
import { byStage, refuseStagesOfDecode } from "../input/pipeline-stages.js";
import type { RequestSettings } from "./sample-request.js";

export interface AnalyseOptions extends RequestSettings {
  readonly bandwidthGBps: number;
  readonly conversions: readonly ReceiveConversion[];
  readonly masksUncovered: boolean;
  readonly form: "permute" | "direct" | undefined;
}

/**
 * Plans of all decode ranks.
 * @throws The errors of `buildEngineTransferPlan`.
 */
export function plansOf(
  pair: Pair,
  options: Pick<AnalyseOptions, "conversions" | "masksUncovered" | "form" | "computedBlocks">,
): EngineTransferPlan[] {
  refuseStagesOfDecode(pair.decode);
  const stages = byStage(pair.prefill);
  return pair.decode.map((local) => {
    const [remote] = pair.prefill;
    const asked = handshakeTargetRanks({
      tpRank: local.tpRank,
      tpSize: local.tpSize,
      remoteTpSize: remote?.tpSize ?? 1,
      dcpSize: local.dcpSize ?? 1,
      remoteDcpSize: remote?.dcpSize ?? 1,
    });
    return buildEngineTransferPlan({
      local,
      remotes: stages.flatMap((ranks) => asked.flatMap((rank) => ranks[rank] ?? [])),
      numKvHeads: pair.numKvHeads,
      groups: pair.groups,
      groupKvHeads: pair.groupKvHeads,
      cacheDtype: pair.cacheDtype,
      conversions: options.conversions,
      masksUncovered: options.masksUncovered,
      prefixCaching: options.computedBlocks > 0,
      form: options.form,
    });
  });
}
