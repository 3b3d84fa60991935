import { rankGeometry } from "@kv/fleet";
import { KvError, systemClock, type Transport } from "@kv/interface";
import type { AgentMetadata } from "@kv/protocol";
import { readDoneText } from "../../protocol/remote-prefill.js";
import type { Check } from "../pair-report.js";
import type { ServerFacts } from "../server-facts.js";
import { type ProbeRequest, probeMemory } from "./memory-probe.js";
import { type ProbeOutcome, probeInChildProcess } from "./probe-process.js";
import type { UcxLane } from "./ucx-lanes.js";

/** How the servers' memory is read. */
export interface MemoryCheckOptions {
  /** Bytes to read at most from each server. Default: 64 MiB. */
  readonly limitBytes?: number | undefined;
  /** Write block 0 of each region of the prefill server back as it was read; vLLM gives this block to no request. Default: false. */
  readonly write?: boolean | undefined;
  /** NIXL backends in order of preference. Default: the transport's. */
  readonly backends?: readonly string[] | undefined;
  /** Limit of the process that reads the memory of one server, in ms. Default: 60000. */
  readonly timeoutMs?: number | undefined;
  /** Read over this transport in this process. Default: over NIXL in a child process, which may crash on damaged metadata. */
  readonly transport?: Transport | undefined;
}

const DEFAULT_LIMIT_BYTES = 64 << 20;
/** NIXL alone takes seconds to start on a busy machine. */
const DEFAULT_TIMEOUT_MS = 60_000;

/**
 * Reads the memory of one server, and of the prefill server writes its null blocks back when asked to. Then notifies `ranks`, all ranks that
 * keep blocks for the doctor. No checks for a server without metadata.
 */
export async function memoryChecks(
  server: ServerFacts,
  ranks: readonly AgentMetadata[],
  options: MemoryCheckOptions,
): Promise<Check[]> {
  if (server.metadata === undefined) return [];
  const request = probeRequest(server, server.metadata, ranks, options);
  return describeOutcome(server, await runProbe(request, options));
}

function probeRequest(
  { role, remotePrefill }: ServerFacts,
  metadata: AgentMetadata,
  ranks: readonly AgentMetadata[],
  options: MemoryCheckOptions,
): ProbeRequest {
  const { regions, deviceId } = rankGeometry(metadata, { tpRank: 0, tpSize: 1 });
  const memoryType = regions[0]?.memoryType ?? "DRAM";
  // Only a pull P frees blocks by notification.
  const text =
    remotePrefill?.transferMode === "pull" ? readDoneText(remotePrefill.remoteRequestId) : undefined;
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
    limitBytes: options.limitBytes ?? DEFAULT_LIMIT_BYTES,
    write: role === "prefill" && options.write === true,
    backends: options.backends ?? [],
    notifications:
      text === undefined
        ? []
        : ranks.map(({ agentMetadata }) => ({ agentMetadata: base64(agentMetadata), text })),
  };
}

async function runProbe(
  request: ProbeRequest,
  { transport, timeoutMs = DEFAULT_TIMEOUT_MS }: MemoryCheckOptions,
): Promise<ProbeOutcome> {
  if (transport === undefined) return await probeInChildProcess(request, timeoutMs);
  try {
    return { kind: "completed", result: await probeMemory(transport, request, systemClock()), lanes: [] };
  } catch (thrown) {
    const { code, message, hint } = KvError.from(thrown, "KV_INTERNAL", "the probe failed");
    return { kind: "failed", code, message, hint };
  }
}

function describeOutcome({ role, metadata }: ServerFacts, outcome: ProbeOutcome): Check[] {
  const about = { id: `bytes.${role}`, area: "bytes" as const, title: `read from ${role}` };
  if (outcome.kind !== "completed")
    return [{ ...about, status: "fail", ...describeFailure(outcome, metadata) }];
  const { result, lanes } = outcome;
  const { block, bulk, write, backends, connectMs, isStable } = result;
  const checks: Check[] = [
    {
      ...about,
      status: "ok",
      found:
        `${size(bulk.lengthBytes)} in ${bulk.bestMs.toFixed(1)} ms (${rate(bulk.lengthBytes, bulk.bestMs)}), ` +
        `a block of ${size(block.lengthBytes)} in ${block.medianMs.toFixed(2)} ms, first contact ${connectMs.toFixed(0)} ms`,
      details: { ...result },
    },
  ];
  if (write !== undefined) {
    const found = `${size(write.lengthBytes)} in ${write.ms.toFixed(1)} ms: the null blocks, unchanged`;
    checks.push({ ...about, id: `bytes.${role}-write`, title: `write to ${role}`, status: "ok", found });
  }
  checks.push(describeTransport(role, backends, lanes));
  if (!isStable) {
    checks.push({
      ...about,
      id: `bytes.${role}-stable`,
      title: "repeated read",
      status: "note",
      found:
        "two reads of block 0 differ: requests write to it, or a read does not return the server's memory",
    });
  }
  return checks;
}

function describeTransport(
  role: ServerFacts["role"],
  backends: readonly string[],
  lanes: readonly UcxLane[],
): Check {
  const about = { id: `bytes.${role}-transport`, area: "bytes" as const, title: "transport" };
  const [last] = lanes.slice(-1);
  if (last === undefined)
    return { ...about, status: "note", found: `${backends.join(", ")}; it does not report its network` };
  const found = `${backends.join(", ")} over ${last.how}`;
  const isTcp = /\btcp\b/.test(last.how) && !/\blo\b/.test(last.how);
  if (!isTcp) return { ...about, status: "ok", found, details: { lanes } };
  return {
    ...about,
    status: "warn",
    found,
    fix: "UCX uses TCP: if this host has an RDMA card, run npx kv-nixl doctor; on EFA use the LIBFABRIC backend on both servers",
    details: { lanes },
  };
}

function describeFailure(
  outcome: Exclude<ProbeOutcome, { kind: "completed" }>,
  metadata: AgentMetadata | undefined,
): Pick<Check, "found" | "fix" | "details"> {
  const isGpu = metadata?.regionMemoryTypes?.includes("VRAM") === true;
  switch (outcome.kind) {
    case "failed": {
      const environment =
        "UCX finds a transport only when both hosts permit it: compare UCX_TLS and UCX_NET_DEVICES on both";
      const gpu = isGpu
        ? "; GPU memory may not be readable from a host without a GPU: run this on the decode host"
        : "";
      return {
        found: `${outcome.message} [${outcome.code}]`,
        fix: outcome.hint ?? `${environment}${gpu}`,
        details: { ...outcome },
      };
    }
    case "crashed":
      return {
        found: `the reading process crashed (${outcome.how}): NIXL cannot use this server's metadata`,
        fix: "compare the NIXL versions on both hosts (pip show nixl); run npx kv-nixl doctor here",
        details: { ...outcome },
      };
    case "timeout":
      return {
        found: `nothing arrived within ${outcome.timeoutMs / 1000} s`,
        fix: "check that this host can reach the server's data port: UCX takes free ports, UCX_TCP_PORT_RANGE on the server limits them",
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
