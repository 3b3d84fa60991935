import type { SideChannel } from "@kv/interface";
import { reportOfChecks } from "@kv/program";
import type { AgentMetadata } from "@kv/protocol";
import { EngineServer } from "../http/engine-server.js";
import type { GivenGroups } from "../protocol/cache-groups.js";
import {
  HANDSHAKE_TIMEOUT_MS,
  readRankMetadata,
  type SideChannelAddress,
} from "../protocol/handshake.js";
import { compatibilityChecks } from "./compatibility-checks.js";
import { checkHttp, NO_HTTP_FACTS } from "./http-checks.js";
import { leaseChecks } from "./lease-check.js";
import { type MemoryCheckOptions, memoryChecks } from "./memory/memory-checks.js";
import type { Check, PairReport, Role } from "./pair-report.js";
import { planChecks } from "./plan-checks.js";
import type { HttpFacts, ServerFacts } from "./server-facts.js";
import { checkSideChannel } from "./side-channel-checks.js";
import { isLoopback, type Target } from "./target.js";
import { clockChecks, versionChecks } from "./version-checks.js";

/** Options of `pairDoctor`. */
export interface PairDoctorOptions {
  /** The prefill server. */
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
   * @default undefined
   */
  readonly groups?: GivenGroups | undefined;
  /** Known factors of the compatibility hash, by vLLM's names. @default undefined */
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
export async function pairDoctor(options: PairDoctorOptions): Promise<PairReport> {
  const checks: Check[] = [];
  const prefill = await examineServer("prefill", options.prefill, options.decode, options, checks);
  const decode =
    options.decode === undefined
      ? undefined
      : await examineServer("decode", options.decode, options.prefill, options, checks);

  const givenTp = ({ role }: ServerFacts) =>
    role === "prefill" ? options.prefillTp : options.decodeTp;
  const tpOf = (server: ServerFacts) => givenTp(server) ?? server.remotePrefill?.tpSize ?? 1;
  const isTpKnown = (server: ServerFacts) =>
    givenTp(server) !== undefined || server.remotePrefill !== undefined;

  const knownFactors = options.factors ?? {};
  const compatibility = compatibilityChecks(prefill, decode, { knownFactors, tpOf });
  checks.push(...versionChecks(prefill, decode, compatibility.factors), ...compatibility.checks);
  if (decode !== undefined) {
    const factors = compatibility.factors.prefill ?? compatibility.factors.decode ?? knownFactors;
    const heads = factors.num_kv_heads ?? knownFactors.num_kv_heads;
    const announced = prefill.cacheSettings?.cache_dtype ?? decode.cacheSettings?.cache_dtype;
    const cacheDtype = factors.cache_dtype ?? knownFactors.cache_dtype ?? announced;
    checks.push(
      ...planChecks(prefill, decode, {
        prefillTp: tpOf(prefill),
        decodeTp: tpOf(decode),
        tpIsAssumed: !isTpKnown(prefill) || !isTpKnown(decode),
        numKvHeads: typeof heads === "number" ? heads : undefined,
        cacheDtype: typeof cacheDtype === "string" ? cacheDtype : undefined,
        groups: options.groups,
      }),
    );
  }
  const servers = decode === undefined ? [prefill] : [prefill, decode];
  checks.push(...clockChecks(servers));
  if (decode !== undefined) checks.push(...leaseChecks(prefill, decode, options.leaseMs));
  if (options.bytes !== undefined) {
    for (const server of servers)
      checks.push(
        ...(await memoryChecks(server, await readAllRanks(server, options), options.bytes)),
      );
  }
  return reportOfChecks(checks);
}

async function examineServer(
  role: Role,
  target: Target,
  peer: Target | undefined,
  options: PairDoctorOptions,
  checks: Check[],
): Promise<ServerFacts> {
  let httpFacts = NO_HTTP_FACTS;
  if (target.kind === "server") {
    const server = new EngineServer(target.url, { timeoutMs: options.httpTimeoutMs });
    const http = await checkHttp(role, server, options.ask ?? true);
    httpFacts = http.facts;
    checks.push(...http.checks);
  }
  const sideChannel = await checkSideChannel({
    role,
    sideChannel: options.sideChannel,
    timeoutMs: options.timeoutMs ?? HANDSHAKE_TIMEOUT_MS,
    address: chooseAddress(target, httpFacts, options.sideChannels?.[role]),
    serverHost: target.kind === "server" ? target.host : undefined,
    peerIsElsewhere: peer !== undefined && !isLoopback(peer.host) && isLoopback(target.host),
    expectedEngineId: httpFacts.remotePrefill?.remoteEngineId,
  });
  checks.push(...sideChannel.checks);
  return { role, ...httpFacts, ...sideChannel.facts };
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
