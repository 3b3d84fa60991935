import { KvError, type SideChannel } from "@kv/interface";
import { reportOfChecks } from "@kv/program";
import { type Check, check, type Report, type Role } from "../checks/report.js";
import { EngineServer } from "../http/engine-server.js";
import type { GivenGroups } from "../protocol/cache-groups.js";
import { readAllRanks, type SideChannelAddress, sideChannelOf } from "../protocol/remote-engine.js";
import { compatibilityChecks } from "./compatibility-checks.js";
import { readHttp } from "./http-checks.js";
import { type MemoryCheckOptions, memoryChecks } from "./memory/memory-checks.js";
import { planChecks } from "./plan-checks.js";
import type { HttpFacts, ServerFacts } from "./server-facts.js";
import { readSideChannel, roundTripMs } from "./side-channel-checks.js";
import { isLoopback, type Target } from "./target.js";
import { versionChecks } from "./versions.js";

/** Options of `pairDoctor`. */
export interface PairDoctorOptions {
  readonly prefill: Target;
  /** @default only the prefill server is checked */
  readonly decode?: Target | undefined;
  /** The caller closes it. */
  readonly sideChannel: SideChannel;
  /** @default memory is not read */
  readonly bytes?: MemoryCheckOptions | undefined;
  /** @default as it announces, else 1 */
  readonly prefillTp?: number | undefined;
  /** @default as it announces, else 1 */
  readonly decodeTp?: number | undefined;
  /** Of servers that announce none. @default port 5600 of the target's host */
  readonly sideChannels?:
    | Readonly<Partial<Record<Role, SideChannelAddress | undefined>>>
    | undefined;
  /** Learn each server's side channel with a prompt of two tokens. @default true */
  readonly ask?: boolean | undefined;
  /** Kinds that P's handshake does not say. */
  readonly groups?: GivenGroups | undefined;
  /** Known factors of the compatibility hash, by vLLM's names. */
  readonly factors?: Readonly<Record<string, unknown>> | undefined;
  /** P's `kv_lease_duration`, which it does not announce. @default 30_000 */
  readonly leaseMs?: number | undefined;
  /** Limit of one handshake, in ms. @default 5_000 */
  readonly timeoutMs?: number | undefined;
  /** Limit of one HTTP request that does not compute, in ms. @default 5_000 */
  readonly httpTimeoutMs?: number | undefined;
  /** Ends the checks when the blocks of its prompts are freed. */
  readonly signal?: AbortSignal | undefined;
}

const DEFAULT_PORT = 5600;

/**
 * Checks what KV transfers between two servers depend on. Problems are in the report.
 *
 * @throws `KV_REQUEST_ABORTED` for an aborted signal.
 */
export async function pairDoctor(options: PairDoctorOptions): Promise<Report> {
  const prefill = await readServer("prefill", options.prefill, options.decode, options);
  const decode =
    options.decode && (await readServer("decode", options.decode, options.prefill, options));

  const givenTp = { prefill: options.prefillTp, decode: options.decodeTp };
  const announcedTp = ({ role, remotePrefill }: ServerFacts) =>
    givenTp[role] ?? remotePrefill?.tpSize;
  const tpOf = (server: ServerFacts) => announcedTp(server) ?? 1;
  const { factors: knownFactors = {}, leaseMs = DEFAULT_LEASE_MS, bytes, signal } = options;
  const { factors, checks: hashes } = compatibilityChecks(prefill, decode, { knownFactors, tpOf });
  const servers = decode === undefined ? [prefill] : [prefill, decode];
  const memory: Check[] = [];
  for (const server of bytes === undefined ? [] : servers) {
    const { metadata, remotePrefill } = server;
    const ranks =
      metadata === undefined || remotePrefill === undefined
        ? []
        : await readAllRanks(options.sideChannel, remotePrefill, metadata, options.timeoutMs);
    const limit = signal?.aborted === true ? { limitBytes: 0 } : {};
    memory.push(...(await memoryChecks(server, ranks, { ...bytes, ...limit })));
  }
  if (signal?.aborted === true)
    throw new KvError("KV_REQUEST_ABORTED", "the checks were interrupted");

  const checks = [
    ...servers.flatMap(({ reading = [] }) => reading),
    ...versionChecks(prefill, decode, factors),
    ...hashes,
  ];
  if (decode !== undefined) {
    const known = { ...knownFactors, ...(factors.prefill ?? factors.decode) };
    const { num_kv_heads: numKvHeads, cache_dtype: cacheDtype = announcedDtype(servers) } = known;
    const plan = {
      prefillTp: tpOf(prefill),
      decodeTp: tpOf(decode),
      tpIsAssumed: servers.some((server) => announcedTp(server) === undefined),
      numKvHeads: typeof numKvHeads === "number" ? numKvHeads : undefined,
      cacheDtype: typeof cacheDtype === "string" ? cacheDtype : undefined,
      groups: options.groups,
    };
    checks.push(...planChecks(prefill, decode, plan));
  }
  checks.push(...servers.flatMap(clockChecks));
  if (decode !== undefined) checks.push(...leaseChecks(prefill, decode, leaseMs));
  return reportOfChecks([...checks, ...memory]);
}

function announcedDtype(servers: readonly ServerFacts[]): string | undefined {
  return servers.flatMap(({ cacheSettings }) => cacheSettings?.cache_dtype ?? [])[0];
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

function chooseAddress(
  target: Target,
  { remotePrefill }: HttpFacts,
  given: SideChannelAddress | undefined,
): SideChannelAddress & { readonly source: "server" | "user" | "default" } {
  if (target.kind === "side-channel")
    return { host: target.host, port: target.port, source: "user" };
  if (remotePrefill !== undefined) return { ...sideChannelOf(remotePrefill), source: "server" };
  if (given !== undefined) return { ...given, source: "user" };
  return { host: target.host, port: DEFAULT_PORT, source: "default" };
}

const DEFAULT_LEASE_MS = 30_000;
const MARGIN = 2;
const SLOW_ROUND_TRIP_MS = 500;

/**
 * In pull, D's heartbeats extend P's lease while D's engine steps. In push, vLLM's heartbeats do
 * not reach P's request (vllm-project/vllm#53244).
 */
export function leaseChecks(
  { remotePrefill }: ServerFacts,
  { queueTime }: ServerFacts,
  leaseMs: number,
): Check[] {
  if (queueTime === undefined) return [];
  const { requests, p99Seconds } = queueTime;
  const leaseSeconds = leaseMs / 1000;
  const isMeasured = Number.isFinite(p99Seconds);
  const limit = isMeasured ? `at most ${p99Seconds} s` : "longer than the metric's largest bucket";
  const found = `99 % of ${requests} requests waited ${limit} in the queue; a lease lasts ${leaseSeconds} s`;
  const details = { requests, p99Seconds: isMeasured ? p99Seconds : null, leaseSeconds };
  const neededSeconds = p99Seconds * MARGIN;
  if (neededSeconds <= leaseSeconds)
    return [check("decode.lease", "lease", "ok", found, undefined, details)];
  const but =
    remotePrefill?.transferMode === "push"
      ? "because vLLM's heartbeats do not extend a push lease"
      : "unless heartbeats of D arrive in time";
  const wanted = isMeasured ? `to at least ${Math.ceil(neededSeconds)}` : "further";
  const freed = `${found} (--lease): P frees the blocks of a request that waits longer, ${but}`;
  const fix = `raise kv_lease_duration in kv_connector_extra_config ${wanted} on both servers, or add decode servers`;
  return [check("decode.lease", "lease", "warn", freed, fix, details)];
}

function clockChecks({ role, clockSamples = [] }: ServerFacts): Check[] {
  if (clockSamples.length === 0) return [];
  const rttMs = Math.min(...clockSamples.map(roundTripMs));
  const found = `the end of a lease is known to within ${Math.max(0.1, rttMs / 2).toFixed(1)} ms (round trip ${rttMs.toFixed(1)} ms)`;
  const isSlow = rttMs > SLOW_ROUND_TRIP_MS;
  const fix = isSlow ? "the server or the network is slow: raise kv_lease_duration" : undefined;
  return [check(`clocks.${role}`, `clock of ${role}`, isSlow ? "warn" : "ok", found, fix)];
}
