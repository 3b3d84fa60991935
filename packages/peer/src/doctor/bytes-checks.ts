import { type AgentMetadata, encodeNotification } from "@kv/protocol";
import { geometryOf } from "../rank-geometry.js";
import type { Check } from "../report/check.js";
import type { BytesAnswer, BytesQuestion } from "./bytes-probe.js";
import type { Side } from "./side.js";
import type { UcxLane } from "./ucx-lanes.js";

/** How the probe's process ended. */
export type BytesOutcome =
  | { readonly kind: "answered"; readonly answer: BytesAnswer; readonly lanes: readonly UcxLane[] }
  | { readonly kind: "failed"; readonly code: string; readonly message: string; readonly hint?: string }
  | { readonly kind: "died"; readonly how: string }
  | { readonly kind: "late"; readonly timeoutMs: number };

export interface QuestionOptions {
  readonly limitBytes: number;
  readonly write: boolean;
  readonly backends: readonly string[];
  /** Of all ranks that keep blocks for this check, as far as they are known. */
  readonly ranks: readonly AgentMetadata[];
}

/** What to ask of the probe about a side; undefined when it told no memory. */
export function bytesQuestion({ metadata, told }: Side, options: QuestionOptions): BytesQuestion | undefined {
  if (metadata === undefined) return undefined;
  const { regions, deviceId } = geometryOf(metadata, { tpRank: 0, tpSize: 1 });
  const memoryType = regions[0]?.memoryType ?? "DRAM";
  const { limitBytes, write, backends, ranks } = options;
  const requestId = told?.transferMode === "pull" ? told.remoteRequestId : undefined;
  const text =
    requestId === undefined
      ? ""
      : new TextDecoder().decode(encodeNotification({ kind: "done", requestId, readers: 1 }));
  return {
    agentMetadata: base64(metadata.agentMetadata),
    deviceId,
    memoryType,
    regions: regions
      .filter((region) => region.memoryType === memoryType)
      .map(({ baseAddress, numBlocks, blockLengthBytes, blockStrideBytes }) => ({
        baseAddress,
        numBlocks,
        blockLengthBytes,
        blockStrideBytes,
      })),
    limitBytes,
    write,
    backends,
    farewells:
      text === "" ? [] : ranks.map(({ agentMetadata }) => ({ agentMetadata: base64(agentMetadata), text })),
  };
}

export function bytesChecks({ role, metadata }: Side, outcome: BytesOutcome): Check[] {
  const about = { id: `bytes.${role}`, area: "bytes" as const, title: `read from ${role}` };
  if (outcome.kind !== "answered") return [{ ...about, status: "fail", ...failure(outcome, metadata) }];
  const { answer, lanes } = outcome;
  const { block, bulk, write, backends, connectMs, isStable } = answer;
  const checks: Check[] = [
    {
      ...about,
      status: "ok",
      found:
        `${size(bulk.lengthBytes)} in ${bulk.bestMs.toFixed(1)} ms (${rate(bulk.lengthBytes, bulk.bestMs)}), ` +
        `a block of ${size(block.lengthBytes)} in ${block.medianMs.toFixed(2)} ms, first contact ${connectMs.toFixed(0)} ms`,
      details: { ...answer },
    },
  ];
  if (write !== undefined) {
    const found = `${size(write.lengthBytes)} in ${write.ms.toFixed(1)} ms: the null blocks, unchanged`;
    checks.push({ ...about, id: `bytes.${role}-write`, title: `write to ${role}`, status: "ok", found });
  }
  checks.push(transportCheck(role, backends, lanes));
  if (!isStable) {
    const found =
      "block 0 was not the same twice: requests write to it, or what is read is not what is there";
    checks.push({
      ...about,
      id: `bytes.${role}-stable`,
      title: "the same bytes twice",
      status: "note",
      found,
    });
  }
  return checks;
}

function transportCheck(role: Side["role"], backends: readonly string[], lanes: readonly UcxLane[]): Check {
  const about = { id: `bytes.${role}-transport`, area: "bytes" as const, title: "by" };
  const [last] = lanes.slice(-1);
  if (last === undefined)
    return { ...about, status: "note", found: `${backends.join(", ")}, which does not say over what` };
  const found = `${backends.join(", ")} over ${last.how}`;
  const isTcp = /\btcp\b/.test(last.how) && !/\blo\b/.test(last.how);
  if (!isTcp) return { ...about, status: "ok", found, details: { lanes } };
  return {
    ...about,
    status: "warn",
    found,
    fix: "UCX goes over tcp: with an RDMA card here, see npx kv-nixl doctor; on EFA use the LIBFABRIC backend on both sides",
    details: { lanes },
  };
}

function failure(outcome: Exclude<BytesOutcome, { kind: "answered" }>, metadata: AgentMetadata | undefined) {
  const vram = metadata?.regionMemoryTypes?.includes("VRAM") === true;
  switch (outcome.kind) {
    case "failed": {
      const environment =
        "UCX finds a way only when both sides allow it: compare UCX_TLS and UCX_NET_DEVICES here and there";
      const gpu = vram
        ? "; reading GPU memory from a host without one may not be possible: run this on the decode host"
        : "";
      return {
        found: `${outcome.message} [${outcome.code}]`,
        fix: outcome.hint ?? `${environment}${gpu}`,
        details: { ...outcome },
      };
    }
    case "died":
      return {
        found: `the process that tried died (${outcome.how}): NIXL cannot use this server's metadata`,
        fix: "compare the NIXL versions on both hosts (pip show nixl); run npx kv-nixl doctor here",
        details: { ...outcome },
      };
    case "late":
      return {
        found: `nothing arrived within ${outcome.timeoutMs / 1000} s`,
        fix: "is the server's data port open to this host? UCX takes free ones: UCX_TCP_PORT_RANGE on the server fixes them",
        details: { ...outcome },
      };
  }
}

const base64 = (bytes: Uint8Array) => Buffer.from(bytes).toString("base64");

function size(bytes: number): string {
  return bytes < 1 << 20 ? `${(bytes / 1024).toFixed(0)} KiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
}

function rate(bytes: number, ms: number): string {
  return `${(bytes / 1e6 / Math.max(ms, 0.001)).toFixed(2)} GB/s`;
}
