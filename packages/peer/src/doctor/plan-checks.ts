import {
  assumedGroups,
  CONVERSIONS,
  hasMla,
  type PairToPlan,
  planRanks,
  vllmLimit,
} from "@kv/fleet";
import { KvError } from "@kv/interface";
import { postingLines, postingOf } from "@kv/kv-plan";
import type { EngineTransferPlan } from "@kv/plan";
import { type Check, check } from "../checks/report.js";
import { ranksLike } from "../live-plan/live-pair.js";
import { type GivenGroups, groupKinds } from "../protocol/cache-groups.js";
import type { ServerFacts } from "./server-facts.js";

interface PlanOptions {
  readonly prefillTp: number;
  readonly decodeTp: number;
  readonly tpIsAssumed: boolean;
  readonly numKvHeads: number | undefined;
  readonly cacheDtype?: string | undefined;
  readonly groups?: GivenGroups | undefined;
}

export function planChecks(
  prefill: ServerFacts,
  decode: ServerFacts,
  options: PlanOptions,
): Check[] {
  const { metadata: remote } = prefill;
  const { metadata: local } = decode;
  if (remote === undefined || local === undefined) return [];
  const { prefillTp, decodeTp, cacheDtype } = options;
  const numGroups = prefill.remotePrefill?.remoteBlockIds.length ?? assumedGroups(remote).length;
  const title = `TP ${prefillTp} to TP ${decodeTp}`;
  const pair: PairToPlan = {
    prefill: remote,
    decode: local,
    prefillTp,
    decodeTp,
    numKvHeads: options.numKvHeads ?? Math.max(prefillTp, decodeTp),
    groups: assumedGroups(remote, numGroups),
    cacheDtype,
  };
  let toPlan = pair;
  const checks: Check[] = [];
  try {
    toPlan = { ...pair, groups: groupKinds(remote, numGroups, options.groups) };
    checks.push(tryPlan(title, toPlan, options));
  } catch (thrown) {
    const { message, hint, code } = KvError.from(thrown, "KV_INTERNAL", "no kinds");
    const found = `no plan was tried: ${message}`;
    checks.push(check("plan.built", title, "note", found, hint, { code }));
  }
  const isVllm = ({ vllmVersion }: ServerFacts) => vllmVersion !== undefined;
  const limit = vllmLimit(toPlan, {
    isPush: [prefill, decode].some(({ remotePrefill }) => remotePrefill?.transferMode === "push"),
    hasVllm: isVllm(prefill) || isVllm(decode),
    decodeIsVllm: isVllm(decode),
    prefillIsVllm: isVllm(prefill),
    decodeVersion: decode.vllmVersion,
  });
  if (limit !== undefined)
    checks.push(check("plan.vllm", "vLLM's own limits", "fail", limit.text, limit.fix));
  return checks;
}

function tryPlan(
  title: string,
  pair: PairToPlan,
  { tpIsAssumed, numKvHeads, cacheDtype }: PlanOptions,
): Check {
  const splitsHeads = pair.prefillTp !== pair.decodeTp && !hasMla(pair.prefill);
  const assumed: string[] = [];
  if (tpIsAssumed) assumed.push("a TP size (--prefill-tp, --decode-tp)");
  if (numKvHeads === undefined && splitsHeads) assumed.push("the number of KV heads (--kv-heads)");
  if (cacheDtype === undefined && splitsHeads)
    assumed.push(
      "a cache whose blocks are split by head, as they are not with nvfp4 (--kv-cache-dtype)",
    );
  const tail = assumed.length === 0 ? "" : `\nassumed: ${assumed.join(", ")}`;
  try {
    const found = [describe(planRanks(pair)), ...postings(pair)].join("\n");
    return check("plan.built", title, "ok", found + tail);
  } catch (refused) {
    return refusal(title, KvError.from(refused, "KV_PLAN_INVALID", "no plan"), pair, tail);
  }
}

const SAMPLE_TOKENS = 2048;

function postings(pair: PairToPlan): readonly string[] {
  try {
    const posting = postingOf(
      {
        ...pair,
        title: "pair",
        assumed: [],
        windowTokens: pair.groups.map(() => undefined),
        prefill: ranksLike(pair.prefill, pair.prefillTp),
        decode: ranksLike(pair.decode, pair.decodeTp),
      },
      SAMPLE_TOKENS,
    );
    return [`a request of ${SAMPLE_TOKENS} tokens:`, ...postingLines(posting)];
  } catch (error) {
    if (KvError.is(error)) return [`descriptors are not counted: ${error.message}`];
    throw error;
  }
}

const FORMS: Readonly<Record<EngineTransferPlan["form"], string>> = {
  copy: "each byte is read to its final place",
  direct: "blocks are cut so that each piece is read to its final place",
  permute: "a pass puts heads and tokens in order after the READ",
};

function describe(plans: readonly EngineTransferPlan[]): string {
  const [first] = plans;
  if (first === undefined) return "nothing to plan";
  const { sources, blockSizeRatio, form, localConsumers, notifyOnlyRanks } = first;
  const heads =
    sources.length > 1 ? `heads of ${sources.length} prefill ranks` : "one prefill rank";
  const blocks = blockSizeRatio > 1 ? `, ${blockSizeRatio} prefill blocks per decode block` : "";
  const others = notifyOnlyRanks.length;
  const notified = others > 0 ? `, notifies ${others} more without reading` : "";
  return (
    `each of ${plans.length} decode ranks reads ${heads}${notified}${blocks}; ${FORMS[form]}; ` +
    `a prefill rank waits for ${localConsumers} notification${localConsumers > 1 ? "s" : ""}`
  );
}

function refusal(title: string, error: KvError, pair: PairToPlan, tail: string): Check {
  const { code, message, hint } = error;
  const details = { code, ...error.details };
  try {
    const [plan] = planRanks(pair, CONVERSIONS);
    const found = `works only with a conversion at decode (${plan?.conversions.join(", ")}): ${message}${tail}`;
    const fix =
      "vLLM's CPU worker repacks heads by itself; for other layouts set enable_permute_local_kv at decode, or use one backend and layout on both";
    return check("plan.built", title, "warn", found, fix, details);
  } catch {
    const fix = hint ?? "use equal block sizes, layouts and attention backends";
    return check("plan.built", title, "fail", `refused: ${message}${tail}`, fix, details);
  }
}
