import type { ChildOutcome } from "../../child/run-in-child.js";
import type { PairAnswer } from "../probes.js";
import type { Check } from "../report.js";
import { withWords } from "../stderr-tail.js";
import { readUcxProtocols, type UcxProtocol } from "./ucx-protocols.js";

/** Variables of the probe: UCX tells what it picks, and where it can be read. */
export const PAIR_ENVIRONMENT = { UCX_PROTO_INFO: "y", UCX_LOG_LEVEL: "info", UCX_LOG_FILE: "stderr" };

/** What two processes on this host do over a backend: whether the bytes are right, which way they went, how fast. */
export function pairChecks(backend: string, outcome: ChildOutcome): Check[] {
  const base = { id: `pair.${backend}`, area: "pair", title: `two processes, ${backend}` } as const;
  if (outcome.kind === "late") {
    return [
      {
        ...base,
        status: "fail",
        found: withWords(
          `no end after ${outcome.timeoutMs / 1000} s: two processes of this host do not reach each other`,
          outcome,
        ),
        fix: "look at UCX_TLS and UCX_NET_DEVICES: they must leave a transport that reaches the peer",
      },
    ];
  }
  if (outcome.kind === "died") {
    return [
      {
        ...base,
        status: "fail",
        found: withWords(`the process that tried it ended with ${outcome.how}`, outcome),
        fix: "try another transport (UCX_TLS=tcp), and please report it with this report as --json",
      },
    ];
  }
  if (outcome.kind === "failed") {
    const { code, message, hint } = outcome.error;
    return [
      {
        ...base,
        status: "fail",
        found: withWords(`${message} [${code}]`, outcome),
        ...(hint === undefined ? {} : { fix: hint }),
      },
    ];
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
  const way =
    own.length > 0
      ? `${own.map(({ how }) => how).join(", ")} by ${lanes}`
      : inPost
        ? "copied within the post"
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
      found: `${way}: the bytes that arrived are not those that were sent`,
      fix: "do not use this backend here; please report it with this report as --json",
    };
  }
  // On one host the kernel copies by CMA; where that is forbidden UCX says so only by being slow.
  if (own.length > 0 && /\btcp\b/.test(lanes) && !/cma|xpmem|knem/.test(lanes)) {
    return {
      ...check,
      status: "warn",
      found: `${way}, ${speed}: the network stack, although both processes are on one host`,
      fix: "allow CMA (ptrace scope above), and leave cma and sm in UCX_TLS",
    };
  }
  return { ...check, status: "ok", found: `${way}, ${speed}` };
}
