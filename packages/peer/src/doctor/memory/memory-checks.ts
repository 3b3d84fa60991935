import { rankGeometry } from "@kv/fleet";
import { KvError, systemClock, type Transport } from "@kv/interface";
import { rdmaDevices, readUcxProtocols, realHost, type UcxProtocol } from "@kv/nixl";
import { type ChildFailure, type ChildOutcome, failureText } from "@kv/program";
import type { AgentMetadata } from "@kv/protocol";
import { readDoneText } from "../../protocol/remote-prefill.js";
import type { Check } from "../pair-report.js";
import type { ServerFacts } from "../server-facts.js";
import { isThisHost } from "../target.js";
import { type ProbeRequest, type ProbeResult, probeMemory } from "./memory-probe.js";
import { probeInChildProcess } from "./probe-process.js";
import {
  gigabytes,
  type HostFacts,
  type MeasuredTransport,
  transportCheck,
  ucxLimits,
  WITHOUT_LIMITS,
} from "./transport-check.js";

/** How the servers' memory is read. */
export interface MemoryCheckOptions {
  /** Bytes to read at most from each server. @default 64 * 1024 * 1024 */
  readonly limitBytes?: number | undefined;
  /**
   * Write block 0 of each region of the prefill server back as it was read; vLLM gives this block
   * to no request. @default false
   */
  readonly write?: boolean | undefined;
  /** NIXL backends in order of preference. @default the transport's */
  readonly backends?: readonly string[] | undefined;
  /** Limit of the process that reads the memory of one server, in ms. @default 60_000 */
  readonly timeoutMs?: number | undefined;
  /**
   * Read over this transport in this process. @default over NIXL in a child process, which may
   * crash on damaged metadata
   */
  readonly transport?: Transport | undefined;
}

const DEFAULT_LIMIT_BYTES = 64 << 20;
/** NIXL alone takes seconds to start on a busy machine. */
const DEFAULT_TIMEOUT_MS = 60_000;

/**
 * Reads the memory of one server, and of the prefill server writes its null blocks back when asked
 * to. Then notifies `ranks`, all ranks that keep blocks for the doctor. No checks for a server
 * without metadata.
 */
export async function memoryChecks(
  server: ServerFacts,
  ranks: readonly AgentMetadata[],
  options: MemoryCheckOptions,
): Promise<Check[]> {
  if (server.metadata === undefined) return [];
  const request = probeRequest(server, server.metadata, ranks, options);
  const outcome = await runProbe(request, options);
  const about = {
    id: `bytes.${server.role}`,
    area: "bytes" as const,
    title: `read from ${server.role}`,
  };
  if (outcome.kind !== "answered")
    return [{ ...about, status: "fail", ...describeFailure(outcome, server.metadata) }];
  const result = outcome.value;
  const used = {
    lanes: readsOf(outcome.output),
    bytesPerMs: result.bulk.lengthBytes / result.bulk.bestMs,
  };
  // The doctor runs on the decode server's host: KV moves between this host and the prefill server.
  const isPath = server.role === "prefill" && used.lanes.length > 0;
  const transport = transportCheck({
    backends: result.backends,
    used,
    hosts: isPath ? await hostFacts(server, request, options) : undefined,
  });
  return [
    ...describeResult(server, result),
    { ...about, id: `bytes.${server.role}-transport`, ...transport },
    ...modeCheck(server, result.write),
  ];
}

async function hostFacts(
  server: ServerFacts,
  request: ProbeRequest,
  options: MemoryCheckOptions,
): Promise<HostFacts> {
  const limits = ucxLimits(process.env);
  return {
    limits,
    unlimited: limits.length === 0 ? undefined : await measureUnlimited(request, options),
    sameHost: server.address !== undefined && isThisHost(server.address.host),
    devices: rdmaDevices(realHost()),
  };
}

/** UCX's protocols for reads, from the output of a process with `UCX_PROTO_INFO=y`. */
export function readsOf(output: string): readonly UcxProtocol[] {
  return readUcxProtocols(output).filter(({ operation }) => operation === "READ");
}

/** How fast the memory was read, and how; undefined when it was not. */
export function measured(outcome: ChildOutcome<ProbeResult>): MeasuredTransport | undefined {
  if (outcome.kind !== "answered") return undefined;
  const { lengthBytes, bestMs } = outcome.value.bulk;
  return { lanes: readsOf(outcome.output), bytesPerMs: lengthBytes / bestMs };
}

/**
 * Reads the memory once more, with every transport that UCX has on this host. Undefined when that
 * fails.
 */
async function measureUnlimited(
  request: ProbeRequest,
  { timeoutMs = DEFAULT_TIMEOUT_MS }: MemoryCheckOptions,
): Promise<MeasuredTransport | undefined> {
  const outcome = await probeInChildProcess(
    { ...request, write: false, notifications: [] },
    timeoutMs,
    WITHOUT_LIMITS,
  );
  return measured(outcome);
}

export function probeRequest(
  { role, remotePrefill }: Pick<ServerFacts, "role" | "remotePrefill">,
  metadata: AgentMetadata,
  ranks: readonly AgentMetadata[],
  options: MemoryCheckOptions,
): ProbeRequest {
  const { regions, deviceId } = rankGeometry(metadata, { tpRank: 0, tpSize: 1 });
  const memoryType = regions[0]?.memoryType ?? "DRAM";
  // Only a pull P frees blocks by notification.
  const text =
    remotePrefill?.transferMode === "pull"
      ? readDoneText(remotePrefill.remoteRequestId)
      : undefined;
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
): Promise<ChildOutcome<ProbeResult>> {
  if (transport === undefined) return await probeInChildProcess(request, timeoutMs);
  try {
    return {
      kind: "answered",
      value: await probeMemory(transport, request, systemClock()),
      output: "",
    };
  } catch (thrown) {
    const { code, message, hint } = KvError.from(thrown, "KV_INTERNAL", "the probe failed");
    return { kind: "failed", error: { code, message, hint }, output: "" };
  }
}

function describeResult({ role }: ServerFacts, result: ProbeResult): Check[] {
  const about = { id: `bytes.${role}`, area: "bytes" as const, title: `read from ${role}` };
  const { block, bulk, write, connectMs, isStable } = result;
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
    const { lengthBytes, movedBytes, writeMs } = write;
    const found = `${size(lengthBytes)}, the null blocks, unchanged (${rate(movedBytes, writeMs)})`;
    checks.push({
      ...about,
      id: `bytes.${role}-write`,
      title: `write to ${role}`,
      status: "ok",
      found,
    });
  }
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

/** From this ratio on, the other mode is advised. */
const MUCH_FASTER = 2;

/**
 * Advises push where WRITE is much faster than READ, which is so on transports that emulate READ,
 * and pull in the reverse case.
 */
export function modeCheck(
  { role, remotePrefill }: Pick<ServerFacts, "role" | "remotePrefill">,
  write: ProbeResult["write"],
): Check[] {
  if (write === undefined) return [];
  const about = { id: `bytes.${role}-mode`, area: "bytes" as const, title: "pull or push" };
  const { movedBytes, writeMs, readMs } = write;
  const mode = remotePrefill?.transferMode ?? "pull";
  const rates = `WRITE ${rate(movedBytes, writeMs)}, READ ${rate(movedBytes, readMs)}, from this host`;
  const details = { ...write, mode };
  const [faster, connector] =
    readMs >= MUCH_FASTER * writeMs
      ? (["push", "NixlPushConnector"] as const)
      : writeMs >= MUCH_FASTER * readMs
        ? (["pull", "NixlConnector"] as const)
        : [mode, ""];
  if (faster === mode)
    return [{ ...about, status: "ok", found: `${mode} is used; ${rates}`, details }];
  const fix = `use ${faster}: set kv_connector to ${connector} on both servers`;
  return [{ ...about, status: "warn", found: `${mode} is used; ${rates}`, fix, details }];
}

function describeFailure(
  outcome: ChildFailure,
  metadata: AgentMetadata | undefined,
): Pick<Check, "found" | "fix" | "details"> {
  const isGpu = metadata?.regionMemoryTypes?.includes("VRAM") === true;
  const found = failureText(outcome);
  if (outcome.kind === "failed") {
    const environment =
      "UCX finds a transport only when both hosts permit it: compare UCX_TLS and UCX_NET_DEVICES on both";
    const gpu = isGpu
      ? "; GPU memory may not be readable from a host without a GPU: run this on the decode host"
      : "";
    return {
      found,
      fix: outcome.error.hint ?? `${environment}${gpu}`,
      details: { kind: "failed", ...outcome.error },
    };
  }
  const details = { kind: outcome.kind, how: outcome.how };
  if (outcome.kind === "crashed")
    return {
      found: `NIXL cannot use this server's metadata: ${found}`,
      fix: "compare the NIXL versions on both hosts (pip show nixl); run npx kv-nixl doctor here",
      details,
    };
  return {
    found,
    fix: "check that this host can reach the server's data port: UCX takes free ports, UCX_TCP_PORT_RANGE on the server limits them",
    details,
  };
}

const base64 = (bytes: Uint8Array) => Buffer.from(bytes).toString("base64");

function size(bytes: number): string {
  return bytes < 1 << 20
    ? `${(bytes / 1024).toFixed(0)} KiB`
    : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
}

function rate(bytes: number, ms: number): string {
  return gigabytes(bytes / Math.max(ms, 0.001));
}
