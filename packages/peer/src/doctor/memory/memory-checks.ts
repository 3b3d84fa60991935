import { rankGeometry } from "@kv/fleet";
import { KvError, systemClock, type Transport } from "@kv/interface";
import { rdmaDevices, readUcxProtocols, realHost, type UcxProtocol } from "@kv/nixl";
import { type ChildFailure, type ChildOutcome, failureText } from "@kv/program";
import type { AgentMetadata } from "@kv/protocol";
import { type Check, check, type Role } from "../../checks/report.js";
import { readDoneText } from "../../protocol/remote-prefill.js";
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
  const { role, metadata, remotePrefill } = server;
  if (metadata === undefined) return [];
  const request = probeRequest(server, metadata, ranks, options);
  const outcome = await runProbe(request, options);
  if (outcome.kind !== "answered") return [failureCheck(role, outcome, metadata)];
  const used = measured(outcome);
  // The doctor runs on the decode server's host: KV moves between this host and the prefill server.
  const isPath = role === "prefill" && used.lanes.length > 0;
  const hosts = isPath ? await hostFacts(server, request, options) : undefined;
  const { backends, write } = outcome.value;
  return [
    ...resultChecks(role, outcome.value),
    transportCheck(role, { backends, used, hosts }),
    ...modeCheck(role, remotePrefill?.transferMode, write),
  ];
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

/** UCX's protocols for reads, from the output of a process with `UCX_PROTO_INFO=y`. */
export function readsOf(output: string): readonly UcxProtocol[] {
  return readUcxProtocols(output).filter(({ operation }) => operation === "READ");
}

function measured({ value, output }: { value: ProbeResult; output: string }): MeasuredTransport {
  const { lengthBytes, bestMs } = value.bulk;
  return { lanes: readsOf(output), bytesPerMs: lengthBytes / bestMs };
}

/**
 * How fast the memory is read with every transport that UCX has on this host. Undefined when it
 * cannot be read.
 */
export async function measureUnlimited(
  request: ProbeRequest,
  timeoutMs = DEFAULT_TIMEOUT_MS,
): Promise<MeasuredTransport | undefined> {
  const outcome = await probeInChildProcess(request, timeoutMs, WITHOUT_LIMITS);
  return outcome.kind === "answered" ? measured(outcome) : undefined;
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
    const value = await probeMemory(transport, request, systemClock());
    return { kind: "answered", value, output: "" };
  } catch (thrown) {
    const { code, message, hint } = KvError.from(thrown, "KV_INTERNAL", "the probe failed");
    return { kind: "failed", error: { code, message, hint }, output: "" };
  }
}

function resultChecks(role: Role, result: ProbeResult): Check[] {
  const { block, bulk, write, connectMs, isStable } = result;
  const found =
    `${size(bulk.lengthBytes)} in ${bulk.bestMs.toFixed(1)} ms (${rate(bulk.lengthBytes, bulk.bestMs)}), ` +
    `a block of ${size(block.lengthBytes)} in ${block.medianMs.toFixed(2)} ms, first contact ${connectMs.toFixed(0)} ms`;
  const checks = [
    check(`bytes.${role}`, `read from ${role}`, "ok", found, { details: { ...result } }),
  ];
  if (write !== undefined)
    checks.push(
      check(
        `bytes.${role}-write`,
        `write to ${role}`,
        "ok",
        `${size(write.lengthBytes)}, the null blocks, unchanged (${rate(write.movedBytes, write.writeMs)})`,
      ),
    );
  if (!isStable)
    checks.push(
      check(
        `bytes.${role}-stable`,
        "repeated read",
        "note",
        "two reads of block 0 differ: requests write to it, or a read does not return the server's memory",
      ),
    );
  return checks;
}

const MUCH_FASTER = 2;
const CONNECTORS = { pull: "NixlConnector", push: "NixlPushConnector" } as const;

/**
 * Advises push where WRITE is much faster than READ, which is so on transports that emulate READ,
 * and pull in the reverse case.
 */
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
  return [
    check(`bytes.${role}-mode`, "pull or push", isSlow ? "warn" : "ok", found, { fix, details }),
  ];
}

function failureCheck(role: Role, outcome: ChildFailure, metadata: AgentMetadata): Check {
  const of = (found: string, fix: string, details: Check["details"]) =>
    check(`bytes.${role}`, `read from ${role}`, "fail", found, { fix, details });
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
