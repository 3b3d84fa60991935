import { type ChildOutcome, failureText } from "@kv/program";
import type { PairAnswer } from "../probes.js";
import type { Check } from "../report.js";
import { readUcxProtocols, type UcxProtocol } from "./ucx-protocols.js";

/** Variables of the probe: UCX prints the protocols that it selects, on stderr. */
export const PAIR_ENVIRONMENT = {
  UCX_PROTO_INFO: "y",
  UCX_LOG_LEVEL: "info",
  UCX_LOG_FILE: "stderr",
};

/**
 * Checks transfers between two processes of this host: whether the bytes are right, which transport
 * moved them, and how fast. `outcome` is that of `pairProbe`.
 */
export function pairChecks(backend: string, outcome: ChildOutcome): Check[] {
  const base = { id: `pair.${backend}`, area: "pair", title: `two processes, ${backend}` } as const;
  if (outcome.kind !== "answered") {
    const check = { ...base, status: "fail", found: failureText(outcome) } as const;
    if (outcome.kind === "failed") return [{ ...check, fix: outcome.error.hint }];
    if (outcome.kind === "crashed") {
      const fix =
        "try another transport (UCX_TLS=tcp), and please report it with the output of --json";
      return [{ ...check, fix }];
    }
    const found = `two processes of this host do not reach each other: ${check.found}`;
    const fix =
      "check UCX_TLS and UCX_NET_DEVICES: they must allow a transport that reaches the peer";
    return [{ ...check, found, fix }];
  }
  const protocols = backend === "UCX" ? readUcxProtocols(outcome.output) : [];
  return (outcome.value as PairAnswer[]).map((answer) => pairCheck(base, answer, protocols));
}

function pairCheck(
  base: Pick<Check, "area" | "id" | "title">,
  answer: PairAnswer,
  protocols: readonly UcxProtocol[],
): Check {
  const { operation, gigabytesPerSecond, consistent, postMs, transferMs } = answer;
  const own = protocols.filter((protocol) => protocol.operation === operation);
  const lanes = [...new Set(own.map((protocol) => protocol.lanes))].join(", ");
  const inPost = postMs / transferMs > 0.8;
  const path =
    own.length > 0
      ? `${own.map(({ how }) => how).join(", ")} by ${lanes}`
      : inPost
        ? "copied during the post"
        : "moved after the post, in the background";
  const check: Omit<Check, "status" | "found"> = {
    ...base,
    id: `${base.id}.${operation}`,
    title: `${base.title}, ${operation}`,
    details: { ...answer, protocols: own },
  };
  const speed = `${gigabytesPerSecond.toPrecision(3)} GB/s (64 MiB in blocks of 64 KiB)`;
  if (!consistent) {
    return {
      ...check,
      status: "fail",
      found: `${path}: the bytes that arrived differ from those that were sent`,
      fix: "do not use this backend here; please report it with the output of --json",
    };
  }
  // On one host the kernel copies by CMA. Where that is forbidden, UCX is slow and prints no
  // warning.
  if (own.length > 0 && /\btcp\b/.test(lanes) && !/cma|xpmem|knem/.test(lanes)) {
    return {
      ...check,
      status: "warn",
      found: `${path}, ${speed}: the network stack, although both processes run on one host`,
      fix: "allow CMA (see ptrace scope), and keep cma and sm in UCX_TLS",
    };
  }
  return { ...check, status: "ok", found: `${path}, ${speed}` };
}
