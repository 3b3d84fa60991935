import {
  assumedGroups,
  CONVERSIONS,
  hasMla,
  type PairToPlan,
  planRanks,
  vllmLimit,
} from "@kv/fleet";
import { type KvCacheKind, KvError } from "@kv/interface";
import { postingLines, postingOf } from "@kv/kv-plan";
import type { EngineTransferPlan } from "@kv/plan";
import { type Check, check } from "../checks/report.js";
import { ranksLike } from "../live-plan/live-pair.js";
import { type GivenGroups, groupKinds } from "../protocol/cache-groups.js";
import type { ServerFacts } from "./server-facts.js";

export interface PlanOptions {
  readonly prefillTp: number;
  readonly decodeTp: number;
  /** A TP size was neither announced nor given by the user. */
  readonly tpIsAssumed: boolean;
  readonly numKvHeads: number | undefined;
  readonly cacheDtype?: string | undefined;
  readonly groups?: GivenGroups | undefined;
}

/**
 * Builds the transfer plan of every decode rank from the metadata of rank (0, 0) of both servers,
 * and reports why a plan is refused.
 */
export function planChecks({
  prefill,
  decode,
  plan: options,
}: {
  readonly prefill: ServerFacts;
  readonly decode: ServerFacts;
  readonly plan: PlanOptions;
}): Check[] {
  const { metadata: remote } = prefill;
  const { metadata: local } = decode;
  if (remote === undefined || local === undefined) return [];
  const { prefillTp, decodeTp, cacheDtype } = options;
  const numKvHeads = options.numKvHeads ?? Math.max(prefillTp, decodeTp);
  const numGroups = prefill.remotePrefill?.remoteBlockIds.length ?? assumedGroups(remote).length;
  const title = `TP ${prefillTp} to TP ${decodeTp}`;
  const planned = (groups: readonly KvCacheKind[]): PairToPlan => ({
    prefill: remote,
    decode: local,
    prefillTp,
    decodeTp,
    numKvHeads,
    groups,
    cacheDtype,
  });
  const checks: Check[] = [];
  // vLLM's own checks need the number of the groups, MLA and states, which handshakes tell.
  let groups = assumedGroups(remote, numGroups);
  try {
    groups = groupKinds(remote, numGroups, options.groups);
    checks.push(tryPlan(title, planned(groups), options));
  } catch (thrown) {
    const { message, hint = "", code } = KvError.from(thrown, "KV_INTERNAL", "no kinds");
    checks.push(
      check("plan.built", title, "note", `no plan was tried: ${message}`, {
        fix: hint,
        details: { code },
      }),
    );
  }
  const limit = vllmLimit(planned(groups), {
    isPush: [prefill, decode].some(({ remotePrefill }) => remotePrefill?.transferMode === "push"),
    hasVllm: prefill.vllmVersion !== undefined || decode.vllmVersion !== undefined,
    decodeIsVllm: decode.vllmVersion !== undefined,
    prefillIsVllm: prefill.vllmVersion !== undefined,
    decodeVersion: decode.vllmVersion,
  });
  if (limit !== undefined)
    checks.push(check("plan.vllm", "vLLM's own limits", "fail", limit.text, { fix: limit.fix }));
  return checks;
}

function tryPlan(
  title: string,
  pair: PairToPlan,
  { tpIsAssumed, numKvHeads, cacheDtype }: PlanOptions,
): Check {
  const { prefill, prefillTp, decodeTp } = pair;
  const splitsHeads = prefillTp !== decodeTp && !hasMla(prefill);
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

/** Tokens of the request whose descriptors are counted, as in kv-plan. */
const SAMPLE_TOKENS = 2048;

function postings({
  prefill,
  decode,
  prefillTp,
  decodeTp,
  numKvHeads,
  groups,
  cacheDtype,
}: PairToPlan): readonly string[] {
  try {
    const posting = postingOf(
      {
        title: "pair",
        numKvHeads,
        groups,
        cacheDtype,
        assumed: [],
        windowTokens: groups.map(() => undefined),
        prefill: ranksLike(prefill, prefillTp),
        decode: ranksLike(decode, decodeTp),
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
  const pass = FORMS[form];
  const notified =
    notifyOnlyRanks.length > 0 ? `, notifies ${notifyOnlyRanks.length} more without reading` : "";
  return (
    `each of ${plans.length} decode ranks reads ${heads}${notified}${blocks}; ${pass}; ` +
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
    return check("plan.built", title, "warn", found, { fix, details });
  } catch {
    const fix = hint ?? "use equal block sizes, layouts and attention backends";
    return check("plan.built", title, "fail", `refused: ${message}${tail}`, { fix, details });
  }
}
