import { rankGeometry } from "@kv/fleet";
import { KvError, systemClock, type Transport } from "@kv/interface";
import { rdmaDevices, readUcxProtocols, realHost, type UcxProtocol } from "@kv/nixl";
import { type ChildFailure, type ChildOutcome, failureText } from "@kv/program";
import type { AgentMetadata } from "@kv/protocol";
import { type Check, check, type Role } from "../../checks/report.js";
import { readDoneText } from "../../protocol/remote-engine.js";
import type { ServerFacts } from "../server-facts.js";
import { isThisHost } from "../target.js";
import {
  type ProbeRequest,
  type ProbeResult,
  probeInChildProcess,
  probeMemory,
} from "./memory-probe.js";
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
  /** Most bytes to read from each server; 0 reads none. @default 64 * 1024 * 1024 */
  readonly limitBytes?: number | undefined;
  /** Write P's block 0, which vLLM gives to no request, back unchanged. @default false */
  readonly write?: boolean | undefined;
  /** NIXL backends by preference. @default the transport's */
  readonly backends?: readonly string[] | undefined;
  /** Limit of reading one server, in ms. @default 60_000 */
  readonly timeoutMs?: number | undefined;
  /**
   * Read over it in this process. @default over NIXL in a child process, which may crash on damaged
   * metadata
   */
  readonly transport?: Transport | undefined;
}

const DEFAULT_LIMIT_BYTES = 64 << 20;
const DEFAULT_TIMEOUT_MS = 60_000;

/**
 * Reads the servers' memory, writes P's null blocks back on request, and notifies `ranks`, which
 * keep blocks for the doctor.
 */
export async function memoryChecks(
  server: ServerFacts,
  ranks: readonly AgentMetadata[],
  options: MemoryCheckOptions,
): Promise<Check[]> {
  const { role, metadata, remotePrefill } = server;
  if (metadata === undefined) return [];
  const request = probeRequest(server, metadata, ranks, options);
  const { outcome, freed } = await runProbe(request, options);
  const kept = keptCheck(role, remotePrefill, freed);
  if (request.limitBytes === 0) return kept;
  const { value } = outcome.kind === "answered" ? outcome : {};
  if (outcome.kind !== "answered" || value === undefined)
    return [failureCheck(role, outcome as ChildFailure, metadata), ...kept];
  const used = measured(value, outcome.output);
  // This host is D's, so KV moves between it and P.
  const isPath = role === "prefill" && used.lanes.length > 0;
  const hosts = isPath ? await hostFacts(server, request, options) : undefined;
  const { backends, write } = value;
  return [
    ...resultChecks(role, value),
    transportCheck(role, { backends, used, hosts }),
    ...modeCheck(role, remotePrefill?.transferMode, write),
    ...kept,
  ];
}

/** A request that a server keeps for the doctor until its lease ends. */
function keptCheck(
  role: Role,
  remotePrefill: ServerFacts["remotePrefill"],
  outcome: ChildOutcome<unknown>,
): Check[] {
  if (remotePrefill === undefined) return [];
  const isPush = remotePrefill.transferMode === "push";
  if (!isPush && outcome.kind === "answered") return [];
  const reason = isPush || outcome.kind === "answered" ? "it pushes" : failureText(outcome);
  const found = `one request of two tokens stays at ${role} until its lease ends: ${reason}`;
  return [check(`bytes.${role}-kept`, "blocks of the probe", "note", found)];
}

async function hostFacts(
  { address }: ServerFacts,
  request: ProbeRequest,
  { timeoutMs }: MemoryCheckOptions,
): Promise<HostFacts> {
  const limits = ucxLimits(process.env);
  const again = { ...request, write: false, notifications: [] };
  return {
    limits,
    unlimited: limits.length === 0 ? undefined : await measureUnlimited(again, timeoutMs),
    sameHost: address !== undefined && isThisHost(address.host),
    devices: rdmaDevices(realHost()),
  };
}

export function readsOf(output: string): readonly UcxProtocol[] {
  return readUcxProtocols(output).filter(({ operation }) => operation === "READ");
}

function measured({ bulk }: ProbeResult, output: string): MeasuredTransport {
  const { lengthBytes, bestMs } = bulk;
  return { lanes: readsOf(output), bytesPerMs: lengthBytes / bestMs };
}

export async function measureUnlimited(
  request: ProbeRequest,
  timeoutMs = DEFAULT_TIMEOUT_MS,
): Promise<MeasuredTransport | undefined> {
  const { outcome } = await probeOrRelease(request, timeoutMs, WITHOUT_LIMITS);
  return outcome.kind === "answered" && outcome.value !== undefined
    ? measured(outcome.value, outcome.output)
    : undefined;
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

interface Probed {
  readonly outcome: ChildOutcome<ProbeResult | undefined>;
  /** What freed the blocks that the server kept. */
  readonly freed: ChildOutcome<unknown>;
}

/** A child that crashed or hung has freed nothing, so another one does. */
async function probeOrRelease(
  request: ProbeRequest,
  timeoutMs: number,
  environment?: Readonly<Record<string, string>>,
): Promise<Probed> {
  const outcome = await probeInChildProcess(request, timeoutMs, environment);
  const isDead = outcome.kind === "crashed" || outcome.kind === "timeout";
  if (!isDead || request.notifications.length === 0) return { outcome, freed: outcome };
  const again = { ...request, limitBytes: 0 };
  return { outcome, freed: await probeInChildProcess(again, timeoutMs, environment) };
}

async function runProbe(
  request: ProbeRequest,
  { transport, timeoutMs = DEFAULT_TIMEOUT_MS }: MemoryCheckOptions,
): Promise<Probed> {
  if (transport === undefined) return await probeOrRelease(request, timeoutMs);
  try {
    const value = await probeMemory(transport, request, systemClock());
    const outcome = { kind: "answered", value, output: "" } as const;
    return { outcome, freed: outcome };
  } catch (thrown) {
    const { code, message, hint } = KvError.from(thrown, "KV_INTERNAL", "the probe failed");
    const outcome = { kind: "failed", error: { code, message, hint }, output: "" } as const;
    return { outcome, freed: outcome };
  }
}

function resultChecks(role: Role, result: ProbeResult): Check[] {
  const { block, bulk, write, connectMs, isStable } = result;
  const found =
    `${size(bulk.lengthBytes)} in ${bulk.bestMs.toFixed(1)} ms (${rate(bulk.lengthBytes, bulk.bestMs)}), ` +
    `a block of ${size(block.lengthBytes)} in ${block.medianMs.toFixed(2)} ms, first contact ${connectMs.toFixed(0)} ms`;
  const checks = [
    check(`bytes.${role}`, `read from ${role}`, "ok", found, undefined, { ...result }),
  ];
  if (write !== undefined) {
    const written = `${size(write.lengthBytes)}, the null blocks, unchanged (${rate(write.movedBytes, write.writeMs)})`;
    checks.push(check(`bytes.${role}-write`, `write to ${role}`, "ok", written));
  }
  if (!isStable) {
    const differ =
      "two reads of block 0 differ: requests write to it, or a read does not return the server's memory";
    checks.push(check(`bytes.${role}-stable`, "repeated read", "note", differ));
  }
  return checks;
}

const MUCH_FASTER = 2;
const CONNECTORS = { pull: "NixlConnector", push: "NixlPushConnector" } as const;

/** WRITE is much faster than READ on transports that emulate READ. */
export function modeCheck(role: Role, mode = "pull", write: ProbeResult["write"]): Check[] {
  if (write === undefined) return [];
  const { movedBytes, writeMs, readMs } = write;
  const found = `${mode} is used; WRITE ${rate(movedBytes, writeMs)}, READ ${rate(movedBytes, readMs)}, from this host`;
  const details = { ...write, mode };
  const other = mode === "push" ? "pull" : "push";
  const [ownMs, otherMs] = mode === "push" ? [writeMs, readMs] : [readMs, writeMs];
  const isSlow = ownMs >= MUCH_FASTER * otherMs;
  const fix = isSlow
    ? `use ${other}: set kv_connector to ${CONNECTORS[other]} on both servers`
    : undefined;
  const status = isSlow ? "warn" : "ok";
  return [check(`bytes.${role}-mode`, "pull or push", status, found, fix, details)];
}

function failureCheck(role: Role, outcome: ChildFailure, metadata: AgentMetadata): Check {
  const of = (found: string, fix: string, details: Check["details"]) =>
    check(`bytes.${role}`, `read from ${role}`, "fail", found, fix, details);
  const found = failureText(outcome);
  if (outcome.kind === "failed") {
    const gpu = metadata.regionMemoryTypes?.includes("VRAM")
      ? "; GPU memory may not be readable from a host without a GPU: run this on the decode host"
      : "";
    const fix = `UCX finds a transport only when both hosts permit it: compare UCX_TLS and UCX_NET_DEVICES on both${gpu}`;
    return of(found, outcome.error.hint ?? fix, { kind: "failed", ...outcome.error });
  }
  const { kind, how } = outcome;
  if (kind === "crashed")
    return of(
      `NIXL cannot use this server's metadata: ${found}`,
      "compare the NIXL versions on both hosts (pip show nixl); run npx kv-nixl doctor here",
      { kind, how },
    );
  return of(
    found,
    "check that this host can reach the server's data port: UCX takes free ports, UCX_TCP_PORT_RANGE on the server limits them",
    { kind, how },
  );
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
