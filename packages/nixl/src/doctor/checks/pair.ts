import { type ChildOutcome, failureText } from "@kv/program";
import type { Check } from "../../reports.js";
import type { PairAnswer } from "../probes.js";
import { finding } from "./finding.js";
import { readUcxProtocols, type UcxProtocol } from "./ucx-protocols.js";

/** UCX prints the protocols that it selects, on stderr. */
export const PAIR_ENVIRONMENT = {
  UCX_PROTO_INFO: "y",
  UCX_LOG_LEVEL: "info",
  UCX_LOG_FILE: "stderr",
};

const FIXES = {
  crashed: "try another transport (UCX_TLS=tcp), and please report it with the output of --json",
  timeout: "check UCX_TLS and UCX_NET_DEVICES: they must allow a transport that reaches the peer",
};

/** `outcome` is that of `pairProbe`. */
export function pairChecks(backend: string, outcome: ChildOutcome): Check[] {
  const title = `two processes, ${backend}`;
  if (outcome.kind !== "answered") {
    const fix = outcome.kind === "failed" ? outcome.error.hint : FIXES[outcome.kind];
    const late =
      outcome.kind === "timeout" ? "two processes of this host do not reach each other: " : "";
    return [finding("pair", backend, title)("fail", `${late}${failureText(outcome)}`, fix)];
  }
  const protocols = backend === "UCX" ? readUcxProtocols(outcome.output) : [];
  return (outcome.value as PairAnswer[]).map((answer) =>
    pairCheck(backend, title, answer, protocols),
  );
}

function pairCheck(
  backend: string,
  title: string,
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
  const details = { ...answer, protocols: own };
  const check = finding("pair", `${backend}.${operation}`, `${title}, ${operation}`, details);
  const speed = `${gigabytesPerSecond.toPrecision(3)} GB/s (64 MiB in blocks of 64 KiB)`;
  if (!consistent) {
    return check(
      "fail",
      `${path}: the bytes that arrived differ from those that were sent`,
      "do not use this backend here; please report it with the output of --json",
    );
  }
  // On one host the kernel copies by CMA. Where that is forbidden, UCX is slow without a warning.
  if (own.length > 0 && /\btcp\b/.test(lanes) && !/cma|xpmem|knem/.test(lanes)) {
    const found = `${path}, ${speed}: the network stack, although both processes run on one host`;
    const fix =
      "allow CMA (see ptrace scope; a seccomp filter may deny process_vm_readv), and keep cma and sm in UCX_TLS";
    return check("warn", found, fix);
  }
  return check("ok", `${path}, ${speed}`);
}
