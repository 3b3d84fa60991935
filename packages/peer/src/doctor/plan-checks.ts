import { type KvCacheKind, KvError } from "@kv/interface";
import { buildEngineTransferPlan, type EngineTransferPlan, type ReceiveConversion } from "@kv/plan";
import { handshakeTargetRanks } from "@kv/topology";
import { geometryOf } from "../rank-geometry.js";
import type { Check } from "../report/check.js";
import type { Side } from "./side.js";

export interface PlanOptions {
  readonly prefillTp: number;
  readonly decodeTp: number;
  /** A TP size was neither told nor given. */
  readonly tpIsAssumed: boolean;
  readonly numKvHeads: number | undefined;
}

const CONVERSIONS: readonly ReceiveConversion[] = ["attention-order", "hnd-to-nhd"];

/** Builds the plan of every decode rank from what rank (0, 0) of both sides told, and says why it would be refused. */
export function planChecks(prefill: Side, decode: Side, options: PlanOptions): Check[] {
  const { metadata: remote } = prefill;
  const { metadata: local } = decode;
  if (remote === undefined || local === undefined) return [];
  const { prefillTp, decodeTp } = options;
  const isMla = remote.attentionBackend.includes("MLA");
  const numKvHeads = options.numKvHeads ?? Math.max(prefillTp, decodeTp);
  const groups = kindsOf(prefill, isMla);
  const about = { id: "plan.built", area: "plan" as const, title: `TP ${prefillTp} to TP ${decodeTp}` };
  const assumed = [
    ...(options.tpIsAssumed ? ["a TP size (--prefill-tp, --decode-tp)"] : []),
    ...(options.numKvHeads === undefined && prefillTp !== decodeTp && !isMla
      ? ["the number of KV heads (--kv-heads)"]
      : []),
  ];

  function build(conversions: readonly ReceiveConversion[]): EngineTransferPlan[] {
    return Array.from({ length: decodeTp }, (_, tpRank) => {
      const ranks = handshakeTargetRanks({ tpRank, tpSize: decodeTp, remoteTpSize: prefillTp });
      return buildEngineTransferPlan({
        local: geometryOf(local as NonNullable<typeof local>, { tpRank, tpSize: decodeTp }),
        remotes: ranks.map((rank) =>
          geometryOf(remote as NonNullable<typeof remote>, { tpRank: rank, tpSize: prefillTp }),
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

/** The kinds are not on the wire: a group whose list of blocks is shorter than the others' is a window. */
function kindsOf({ told, metadata }: Side, isMla: boolean): KvCacheKind[] {
  const count = told?.remoteBlockIds.length ?? 1 + Math.max(0, ...(metadata?.regionGroupIds ?? [0]));
  return Array.from({ length: count }, () => (isMla ? "mla" : "full"));
}

function describe(plans: readonly EngineTransferPlan[]): string {
  const [first] = plans;
  if (first === undefined) return "nothing to plan";
  const { sources, blockSizeRatio, form, localConsumers, notifyOnlyRanks } = first;
  const heads = sources.length > 1 ? `heads of ${sources.length} prefill ranks` : "one prefill rank";
  const blocks = blockSizeRatio > 1 ? `, ${blockSizeRatio} of its blocks in one here` : "";
  const pass =
    form === "copy" ? "each byte lands where it belongs" : "a pass puts heads and tokens in order afterwards";
  const told = notifyOnlyRanks.length > 0 ? `, ${notifyOnlyRanks.length} more told` : "";
  return (
    `each of ${plans.length} decode ranks reads ${heads}${told}${blocks}; ${pass}; ` +
    `a prefill rank waits for ${localConsumers} notification${localConsumers > 1 ? "s" : ""}`
  );
}

function refusal(refused: unknown, converted: () => EngineTransferPlan[], tail: string) {
  const error = KvError.from(refused, "KV_PLAN_INVALID", "no plan");
  const details = { code: error.code, ...error.details };
  try {
    const [plan] = converted();
    const found = `only with a conversion on the decode side (${plan?.conversions.join(", ")}): ${error.message}${tail}`;
    const fix =
      "vLLM's CPU worker repacks heads by itself; other layouts need enable_permute_local_kv on the decode side, or one backend and layout on both";
    return { status: "warn" as const, found, fix, details };
  } catch {
    const fix = error.hint ?? "use equal block sizes, layouts and attention backends";
    return { status: "fail" as const, found: `refused: ${error.message}${tail}`, fix, details };
  }
}

/** What the plan can and vLLM 0.33 cannot. */
function vllmRefusals(
  prefill: Side,
  decode: Side,
  {
    prefillTp,
    decodeTp,
    numKvHeads,
    isMla,
  }: { prefillTp: number; decodeTp: number; numKvHeads: number; isMla: boolean },
): Check[] {
  const about = { id: "plan.vllm", area: "plan" as const, title: "vLLM's own limits" };
  const isPush = [prefill, decode].some(({ told }) => told?.transferMode === "push");
  const sizes = [prefill.metadata?.blockSize, decode.metadata?.blockSize];
  if (isPush && sizes[0] !== sizes[1]) {
    const found = `push with kernel blocks of ${sizes[0]} and ${sizes[1]} tokens: it fails at prefill, or stops the decode engine`;
    return [{ ...about, status: "fail", found, fix: "give both the same --block-size, or use pull" }];
  }
  if (decode.vllmVersion !== undefined && !isMla && prefillTp > decodeTp && prefillTp > numKvHeads) {
    const found = `a vLLM decode worker refuses prefill TP ${prefillTp} above the ${numKvHeads} KV heads`;
    return [{ ...about, status: "fail", found, fix: `start prefill with TP ${numKvHeads} or less` }];
  }
  return [];
}
