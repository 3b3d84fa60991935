import type { SideChannel } from "@kv/interface";
import { reportOfChecks } from "@kv/program";
import type { AgentMetadata } from "@kv/protocol";
import { judge } from "../checks/list.js";
import type { Check, Report, Role } from "../checks/report.js";
import { EngineServer } from "../http/engine-server.js";
import type { GivenGroups } from "../protocol/cache-groups.js";
import { readRankMetadata, type SideChannelAddress } from "../protocol/handshake.js";
import { compatibilityChecks } from "./compatibility-checks.js";
import { readHttp } from "./http-checks.js";
import { DEFAULT_LEASE_MS } from "./lease-check.js";
import { type MemoryCheckOptions, memoryChecks } from "./memory/memory-checks.js";
import type { PlanOptions } from "./plan-checks.js";
import type { HttpFacts, ServerFacts } from "./server-facts.js";
import { readSideChannel } from "./side-channel-checks.js";
import { isLoopback, type Target } from "./target.js";

/** Options of `pairDoctor`. */
export interface PairDoctorOptions {
  readonly prefill: Target;
  /** The decode server. @default only the prefill server is checked */
  readonly decode?: Target | undefined;
  /** Carries the handshakes. The caller closes it. */
  readonly sideChannel: SideChannel;
  /** Reads the servers' memory. @default their memory is not read */
  readonly bytes?: MemoryCheckOptions | undefined;
  /** TP size of the prefill server. @default as it announces, else 1 */
  readonly prefillTp?: number | undefined;
  /** TP size of the decode server. @default as it announces, else 1 */
  readonly decodeTp?: number | undefined;
  /**
   * Side channels of servers that do not announce theirs. @default port 5600 of the target's host
   */
  readonly sideChannels?:
    | Readonly<Partial<Record<Role, SideChannelAddress | undefined>>>
    | undefined;
  /**
   * Whether each server gets a prompt of two tokens; without one it does not announce its side
   * channel. @default true
   */
  readonly ask?: boolean | undefined;
  /**
   * The kind of each KV cache group, where the handshake of the prefill server does not say it.
   */
  readonly groups?: GivenGroups | undefined;
  /** Known factors of the compatibility hash, by vLLM's names. */
  readonly factors?: Readonly<Record<string, unknown>> | undefined;
  /**
   * `kv_lease_duration` of the prefill server, in ms, which it does not announce. @default 30_000
   */
  readonly leaseMs?: number | undefined;
  /** Limit of one handshake, in ms. @default 5_000 */
  readonly timeoutMs?: number | undefined;
  /** Limit of one HTTP request that does not compute, in ms. @default 5_000 */
  readonly httpTimeoutMs?: number | undefined;
}

/** vLLM's default of `VLLM_NIXL_SIDE_CHANNEL_PORT`. */
const DEFAULT_PORT = 5600;

/**
 * Checks everything that a KV transfer between two servers depends on. Problems of the servers are
 * part of the report and are not thrown.
 */
export async function pairDoctor(options: PairDoctorOptions): Promise<Report> {
  const prefill = await readServer("prefill", options.prefill, options.decode, options);
  const decode =
    options.decode && (await readServer("decode", options.decode, options.prefill, options));

  const givenTp = { prefill: options.prefillTp, decode: options.decodeTp };
  const announcedTp = ({ role, remotePrefill }: ServerFacts) =>
    givenTp[role] ?? remotePrefill?.tpSize;
  const tpOf = (server: ServerFacts) => announcedTp(server) ?? 1;
  const knownFactors = options.factors ?? {};
  const compatibility = compatibilityChecks(prefill, decode, { knownFactors, tpOf });
  const facts = { prefill, decode, compatibility, leaseMs: options.leaseMs ?? DEFAULT_LEASE_MS };
  const memory: Check[] = [];
  if (options.bytes !== undefined)
    for (const server of decode === undefined ? [prefill] : [prefill, decode])
      memory.push(
        ...(await memoryChecks(server, await readAllRanks(server, options), options.bytes)),
      );
  if (decode === undefined) return reportOfChecks(judge({ ...facts, memory }));

  const { factors } = compatibility;
  const found = factors.prefill ?? factors.decode ?? knownFactors;
  const numKvHeads = found.num_kv_heads ?? knownFactors.num_kv_heads;
  const announced = prefill.cacheSettings?.cache_dtype ?? decode.cacheSettings?.cache_dtype;
  const cacheDtype = found.cache_dtype ?? knownFactors.cache_dtype ?? announced;
  const plan: PlanOptions = {
    prefillTp: tpOf(prefill),
    decodeTp: tpOf(decode),
    tpIsAssumed: [prefill, decode].some((server) => announcedTp(server) === undefined),
    numKvHeads: typeof numKvHeads === "number" ? numKvHeads : undefined,
    cacheDtype: typeof cacheDtype === "string" ? cacheDtype : undefined,
    groups: options.groups,
  };
  return reportOfChecks(judge({ ...facts, memory, plan }));
}

async function readServer(
  role: Role,
  target: Target,
  peer: Target | undefined,
  { sideChannel, sideChannels, ask = true, timeoutMs, httpTimeoutMs }: PairDoctorOptions,
): Promise<ServerFacts> {
  const http =
    target.kind === "server"
      ? await readHttp(role, new EngineServer(target.url, { timeoutMs: httpTimeoutMs }), ask)
      : { reading: [] };
  const { reading, ...facts } = await readSideChannel({
    role,
    sideChannel,
    timeoutMs,
    address: chooseAddress(target, http, sideChannels?.[role]),
    serverHost: target.kind === "server" ? target.host : undefined,
    peerIsElsewhere: peer !== undefined && !isLoopback(peer.host) && isLoopback(target.host),
    expectedEngineId: http.remotePrefill?.remoteEngineId,
  });
  return { role, ...http, ...facts, reading: [...http.reading, ...reading] };
}

/**
 * The address that peers use: the target itself, else the server's answer, else the user's, else
 * vLLM's default port.
 */
function chooseAddress(
  target: Target,
  { remotePrefill }: HttpFacts,
  given: SideChannelAddress | undefined,
): SideChannelAddress & { readonly source: "server" | "user" | "default" } {
  if (target.kind === "side-channel")
    return { host: target.host, port: target.port, source: "user" };
  if (remotePrefill !== undefined)
    return { host: remotePrefill.remoteHost, port: remotePrefill.remotePort, source: "server" };
  if (given !== undefined) return { ...given, source: "user" };
  return { host: target.host, port: DEFAULT_PORT, source: "default" };
}

/**
 * The metadata of all ranks that the server announced over HTTP: each keeps blocks for the doctor's
 * prompt and must be notified.
 */
export async function readAllRanks(
  { metadata, remotePrefill, address }: Pick<ServerFacts, "metadata" | "remotePrefill" | "address">,
  { sideChannel, timeoutMs }: Pick<PairDoctorOptions, "sideChannel" | "timeoutMs">,
): Promise<AgentMetadata[]> {
  if (metadata === undefined || remotePrefill === undefined || address === undefined) return [];
  if (remotePrefill.remoteEngineId !== metadata.engineId) return [];
  const ranks = [metadata];
  for (let tpRank = 1; tpRank < remotePrefill.tpSize; tpRank++) {
    try {
      ranks.push((await readRankMetadata(sideChannel, address, { tpRank, timeoutMs })).metadata);
    } catch {
      // Only rank (0, 0) is checked. The blocks of this rank are freed when their lease ends.
    }
  }
  return ranks;
}
