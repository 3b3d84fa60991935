import { type KvCacheKind, KvError } from "@kv/interface";
import { buildEngineTransferPlan, type EngineTransferPlan, type ReceiveConversion } from "@kv/plan";
import { handshakeTargetRanks } from "@kv/topology";
import { rankGeometry } from "../protocol/rank-geometry.js";
import type { Check } from "./pair-report.js";
import type { ServerFacts } from "./server-facts.js";

export interface PlanOptions {
  readonly prefillTp: number;
  readonly decodeTp: number;
  /** A TP size was neither announced nor given by the user. */
  readonly tpIsAssumed: boolean;
  readonly numKvHeads: number | undefined;
}

const CONVERSIONS: readonly ReceiveConversion[] = ["attention-order", "hnd-to-nhd"];

/** Builds the transfer plan of every decode rank from the metadata of rank (0, 0) of both servers, and reports why a plan is refused. */
export function planChecks(prefill: ServerFacts, decode: ServerFacts, options: PlanOptions): Check[] {
  const { metadata: remote } = prefill;
  const { metadata: local } = decode;
  if (remote === undefined || local === undefined) return [];
  const { prefillTp, decodeTp } = options;
  const isMla = remote.attentionBackend.includes("MLA");
  const numKvHeads = options.numKvHeads ?? Math.max(prefillTp, decodeTp);
  const groups = kindsOf(prefill, isMla);
  const about = { id: "plan.built", area: "plan" as const, title: `TP ${prefillTp} to TP ${decodeTp}` };
  const assumed: string[] = [];
  if (options.tpIsAssumed) assumed.push("a TP size (--prefill-tp, --decode-tp)");
  if (options.numKvHeads === undefined && prefillTp !== decodeTp && !isMla)
    assumed.push("the number of KV heads (--kv-heads)");

  function build(conversions: readonly ReceiveConversion[]): EngineTransferPlan[] {
    return Array.from({ length: decodeTp }, (_, tpRank) => {
      const ranks = handshakeTargetRanks({ tpRank, tpSize: decodeTp, remoteTpSize: prefillTp });
      return buildEngineTransferPlan({
        local: rankGeometry(local as NonNullable<typeof local>, { tpRank, tpSize: decodeTp }),
        remotes: ranks.map((rank) =>
          rankGeometry(remote as NonNullable<typeof remote>, { tpRank: rank, tpSize: prefillTp }),
        ),
        numKvHeads,
        groups,
        conversions,
      });
    });
  }

  const checks: Check[] = [];
  const tail = assumed.length === 0 ? "" : `\nassumed: ${assumed.join(", ")}`;
  try {
    checks.push({ ...about, status: "ok", found: describe(build([])) + tail });
  } catch (refused) {
    checks.push({ ...about, ...refusal(refused, () => build(CONVERSIONS), tail) });
  }
  checks.push(...vllmRefusals(prefill, decode, { prefillTp, decodeTp, numKvHeads, isMla }));
  return checks;
}

/** The kind of each KV cache group. Kinds are not on the wire: every group counts as attention, MLA by the backend's name. */
function kindsOf({ remotePrefill, metadata }: ServerFacts, isMla: boolean): KvCacheKind[] {
  const count = remotePrefill?.remoteBlockIds.length ?? 1 + Math.max(0, ...(metadata?.regionGroupIds ?? [0]));
  return Array.from({ length: count }, () => (isMla ? "mla" : "full"));
}

function describe(plans: readonly EngineTransferPlan[]): string {
  const [first] = plans;
  if (first === undefined) return "nothing to plan";
  const { sources, blockSizeRatio, form, localConsumers, notifyOnlyRanks } = first;
  const heads = sources.length > 1 ? `heads of ${sources.length} prefill ranks` : "one prefill rank";
  const blocks = blockSizeRatio > 1 ? `, ${blockSizeRatio} prefill blocks per decode block` : "";
  const pass =
    form === "copy"
      ? "each byte is read to its final place"
      : "a pass puts heads and tokens in order after the READ";
  const notified =
    notifyOnlyRanks.length > 0 ? `, notifies ${notifyOnlyRanks.length} more without reading` : "";
  return (
    `each of ${plans.length} decode ranks reads ${heads}${notified}${blocks}; ${pass}; ` +
    `a prefill rank waits for ${localConsumers} notification${localConsumers > 1 ? "s" : ""}`
  );
}

function refusal(refused: unknown, converted: () => EngineTransferPlan[], tail: string) {
  const error = KvError.from(refused, "KV_PLAN_INVALID", "no plan");
  const details = { code: error.code, ...error.details };
  try {
    const [plan] = converted();
    const found = `works only with a conversion at decode (${plan?.conversions.join(", ")}): ${error.message}${tail}`;
    const fix =
      "vLLM's CPU worker repacks heads by itself; for other layouts set enable_permute_local_kv at decode, or use one backend and layout on both";
    return { status: "warn" as const, found, fix, details };
  } catch {
    const fix = error.hint ?? "use equal block sizes, layouts and attention backends";
    return { status: "fail" as const, found: `refused: ${error.message}${tail}`, fix, details };
  }
}

/** Pairs that have a plan but that vLLM 0.33 cannot serve. */
function vllmRefusals(
  prefill: ServerFacts,
  decode: ServerFacts,
  {
    prefillTp,
    decodeTp,
    numKvHeads,
    isMla,
  }: { prefillTp: number; decodeTp: number; numKvHeads: number; isMla: boolean },
): Check[] {
  const about = { id: "plan.vllm", area: "plan" as const, title: "vLLM's own limits" };
  const isPush = [prefill, decode].some(({ remotePrefill }) => remotePrefill?.transferMode === "push");
  const sizes = [prefill.metadata?.blockSize, decode.metadata?.blockSize];
  if (isPush && sizes[0] !== sizes[1]) {
    const found = `push with kernel blocks of ${sizes[0]} and ${sizes[1]} tokens fails at prefill, or stops the decode engine`;
    return [{ ...about, status: "fail", found, fix: "give both the same --block-size, or use pull" }];
  }
  if (decode.vllmVersion !== undefined && !isMla && prefillTp > decodeTp && prefillTp > numKvHeads) {
    const found = `a vLLM decode worker refuses prefill TP ${prefillTp} above the ${numKvHeads} KV heads`;
    return [{ ...about, status: "fail", found, fix: `start prefill with TP ${numKvHeads} or less` }];
  }
  return [];
}
