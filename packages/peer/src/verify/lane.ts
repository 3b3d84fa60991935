import { open } from "node:fs/promises";
import { KvError, type SideChannel } from "@kv/interface";
import {
  type RdmaDevice,
  rdmaDevices,
  readUcxProtocols,
  realHost,
  type UcxProtocol,
} from "@kv/nixl";
import { doctorReportSchema } from "@kv/nixl/reports";
import type { RemotePrefillParams } from "@kv/protocol";
import { z } from "zod";
import { type Check, check, ROLES, type Role } from "../checks/report.js";
import { measureUnlimited, probeRequest } from "../doctor/memory/memory-checks.js";
import {
  active,
  gigabytes,
  LANE_CLASSES,
  type Lane,
  laneNamed,
  laneOf,
  type MeasuredTransport,
} from "../doctor/memory/transport-check.js";
import { isThisHost, readTarget } from "../doctor/target.js";
import { type EngineServer, PROBE_PROMPT } from "../http/engine-server.js";
import { parseJson } from "../http/http-request.js";
import {
  readAllRanks,
  readRankMetadata,
  readRemotePrefill,
  sideChannelOf,
} from "../protocol/remote-engine.js";
import type { EngineCounters, SeenDeployment } from "./verify-checks.js";

/** The lanes in a server's log. */
export interface LoggedLanes {
  /** From UCX with `UCX_PROTO_INFO=y`. */
  readonly protocols: readonly UcxProtocol[];
  /** Of LIBFABRIC, with `NIXL_LOG_LEVEL=INFO`. */
  readonly provider: string | undefined;
}

/** How bytes move between P and D, as far as known. */
export interface LaneEvidence {
  readonly logs: Partial<Record<Role, LoggedLanes>>;
  readonly reached: Partial<Record<Role, MeasuredTransport>>;
  readonly here: Readonly<Record<Role, boolean>>;
  readonly devices: Partial<Record<Role, readonly RdmaDevice[]>>;
}

const [TCP, RDMA, SHARED_MEMORY] = LANE_CLASSES.map((_, rank) => rank) as [number, number, number];
/** vLLM checks a transfer once per engine step, so shorter times say nothing. */
const LEAST_MEAN_MS = 100;
/** Below it, another or a limited lane is in use. */
const LEAST_SHARE = 0.1;
const LONG_POST_MS = 5;

export function laneChecks({ totals }: SeenDeployment, evidence: LaneEvidence): Check[] {
  const poster: Role = totals.decode.transfers > 0 ? "decode" : "prefill";
  const moved = totals[poster];
  const lane = laneInUse(poster, evidence);
  const speed = speedOf(moved, evidence);
  return [laneCheck(poster, lane, bestLane(evidence), speed), ...speedChecks(moved, lane, speed)];
}

function laneCheck(
  poster: Role,
  lane: LaneInUse | undefined,
  best: Lane | undefined,
  speed: Speed,
): Check {
  const details = { lane, best, ...speed };
  const of = (
    id: string,
    title: string,
    status: Check["status"],
    found: string,
    fix?: string,
  ): Check => check(`lane.${id}`, title, status, found, fix, details);
  const notRdma = (found: string) =>
    of(
      "tcp-instead-of-rdma",
      "TCP instead of RDMA",
      "fail",
      `${found} (vllm-project/vllm#52607)`,
      "permit the devices in UCX_TLS and UCX_NET_DEVICES of both servers, pass /dev/infiniband into containers; with EFA set the backend LIBFABRIC; kv-peer doctor on D's host shows what it reaches",
    );
  if (lane === undefined) {
    if (best?.rank === RDMA && isSlow(speed))
      return notRdma(
        `no log names the lane, and ${gigabytes(speed.bytesPerMs)} is ${percent(speed.share ?? 0)} of what ${best.how} gives`,
      );
    return of(
      "unknown",
      "lane",
      "note",
      `not known: no log of ${poster === "decode" ? "D" : "P"} names it, and not both servers run on this host; best that both hosts have: ${best?.how ?? "not known"}`,
      `start ${poster} with UCX_PROTO_INFO=y (UCX) or NIXL_LOG_LEVEL=INFO (LIBFABRIC), and give its log as --${poster}-log`,
    );
  }
  const found = `${lane.how} (${lane.source}); best that both hosts have: ${best?.how ?? "not known: give --prefill-host and --decode-host"}`;
  if (best === undefined || lane.rank < 0 || lane.rank >= best.rank)
    return of("best", "lane", "ok", found);
  if (best.rank === RDMA) return notRdma(found);
  const fix =
    "set UCX_TLS=all on both servers, or add sysv,posix,cma (cuda_ipc for GPUs); in containers share /dev/shm and the IPC namespace; where cuda_ipc serves only WRITE, use NixlPushConnector (vllm-project/vllm#52607)";
  return lane.rank === TCP
    ? of("tcp-on-one-host", "TCP on one host", "fail", found, fix)
    : of("network-on-one-host", "network on one host", "warn", found, fix);
}

const isSlow = ({ isTimed, share }: Speed) => isTimed && share !== undefined && share < LEAST_SHARE;

interface LaneInUse extends Lane {
  readonly source: string;
}

/**
 * Uses the poster's log, else on one host the worse of those by which it reaches both, because both
 * must permit a lane.
 */
function laneInUse(poster: Role, { logs, reached, here }: LaneEvidence): LaneInUse | undefined {
  const { protocols = [], provider } = logs[poster] ?? {};
  const operation = poster === "decode" ? "READ" : "WRITE";
  const logged = laneOf(protocols.filter((protocol) => protocol.operation === operation));
  const source = `the log of ${poster}`;
  if (logged.how !== "") return { ...logged, how: `UCX over ${logged.how}`, source };
  if (provider !== undefined)
    return { ...laneNamed(provider), how: `LIBFABRIC over ${provider}`, source };
  if (
    !here.prefill ||
    !here.decode ||
    reached.prefill === undefined ||
    reached.decode === undefined
  )
    return undefined;
  const [p, d] = [laneOf(reached.prefill.lanes), laneOf(reached.decode.lanes)];
  if (p.how === "" || d.how === "") return undefined;
  const worse = d.rank < p.rank ? { lane: d, whose: "D" } : { lane: p, whose: "P" };
  return {
    ...worse.lane,
    how: `UCX over ${worse.lane.how}`,
    source: `the best by which this host reaches ${worse.whose}`,
  };
}

function bestLane({ here, devices }: LaneEvidence): Lane | undefined {
  if (here.prefill && here.decode)
    return { how: "shared memory, as both run on one host", rank: SHARED_MEMORY };
  const [p, d] = [devices.prefill, devices.decode];
  if (p === undefined || d === undefined) return undefined;
  const [atP, atD] = [active(p), active(d)];
  const [one, other] = [atP[0], atD[0]];
  if (one === undefined || other === undefined) return { how: "TCP", rank: TCP };
  return { how: `RDMA (${named(one)} at P, ${named(other)} at D)`, rank: RDMA };
}

const named = ({ name, gigabitsPerSecond }: RdmaDevice) =>
  gigabitsPerSecond === undefined ? name : `${name}, ${gigabitsPerSecond} Gb/s`;

interface Speed {
  readonly bytesPerMs: number;
  readonly expectedBytesPerMs: number | undefined;
  readonly expectation: string;
  readonly share: number | undefined;
  readonly meanMs: number;
  readonly postShare: number;
  readonly isTimed: boolean;
}

function speedOf(
  { bytes, transfers, transferSeconds, postSeconds }: EngineCounters,
  evidence: LaneEvidence,
): Speed {
  const meanMs = (1000 * transferSeconds) / Math.max(1, transfers);
  const bytesPerMs = bytes / Math.max(transferSeconds * 1000, 1e-3);
  const { reached, here, devices } = evidence;
  const slower = Math.min(
    ...(["prefill", "decode"] as const).map((role) =>
      Math.max(
        ...active(devices[role] ?? []).map(
          ({ gigabitsPerSecond = Number.NaN }) => gigabitsPerSecond,
        ),
        0,
      ),
    ),
  );
  // A host other than D's may reach P by another way.
  const measured = here.decode ? reached.prefill?.bytesPerMs : undefined;
  const ofDevices = slower > 0 ? (slower * 1e9) / 8 / 1000 : undefined;
  const expectedBytesPerMs = measured ?? ofDevices;
  return {
    bytesPerMs,
    expectedBytesPerMs,
    expectation: measured === undefined ? "where the devices carry" : "where this host reads P at",
    share: expectedBytesPerMs === undefined ? undefined : bytesPerMs / expectedBytesPerMs,
    meanMs,
    postShare: postSeconds / Math.max(transferSeconds, 1e-9),
    isTimed: meanMs >= LEAST_MEAN_MS,
  };
}

function speedChecks(moved: EngineCounters, lane: Lane | undefined, speed: Speed): Check[] {
  const { bytesPerMs, expectedBytesPerMs, expectation, meanMs, postShare, isTimed } = speed;
  const expected =
    expectedBytesPerMs === undefined ? "" : `, ${expectation} ${gigabytes(expectedBytesPerMs)}`;
  const short = isTimed
    ? ""
    : "; too short to be timed well: longer prompts (--prompt-tokens) say more";
  const found = `at least ${gigabytes(bytesPerMs)}${expected}: ${meanMs.toFixed(1)} ms for each transfer${short}`;
  const transfers = Math.max(1, moved.transfers);
  const meanPostMs = (1000 * moved.postSeconds) / transfers;
  const post = `${percent(postShare)} of the time, ${meanPostMs.toFixed(1)} ms, for ${(moved.descriptors / transfers).toFixed(0)} descriptors of a transfer`;
  return [
    isSlow(speed)
      ? check(
          "lane.slow",
          "slow",
          "warn",
          found,
          "compare with kv-peer doctor on D's host; small descriptors, a busy NIC and a limit of UCX_MAX_RNDV_RAILS are usual causes",
        )
      : check("lane.bandwidth", "bandwidth", "ok", found),
    lane?.rank !== SHARED_MEMORY && postShare > 0.5 && meanPostMs > LONG_POST_MS
      ? check(
          "lane.posting",
          "post time",
          "warn",
          post,
          "fewer and larger descriptors: equal block sizes and layouts on both sides; kv-plan shows what merges them (vllm-project/vllm#55434)",
        )
      : check(
          "lane.post-time",
          "post time",
          "ok",
          lane?.rank === SHARED_MEMORY ? `${post}; over shared memory the post is the copy` : post,
        ),
  ];
}

function percent(share: number): string {
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

interface LaneEvidenceOptions {
  /** The first of each is asked. */
  readonly servers: Readonly<Record<Role, readonly EngineServer[]>>;
  readonly logs: Partial<Record<Role, string | undefined>>;
  readonly hosts: Partial<Record<Role, string | undefined>>;
  readonly sideChannel: SideChannel | undefined;
}

const LOG_LIMIT_BYTES = 64 << 20;

/**
 * Reads the files at once, so that a wrong one is refused before a prompt is sent.
 *
 * @throws `KV_CONFIG_INVALID` for a file that cannot be read, as what it resolves with.
 */
export async function laneEvidence({
  servers,
  logs,
  hosts,
  sideChannel,
}: LaneEvidenceOptions): Promise<() => Promise<LaneEvidence>> {
  const given: Partial<Record<Role, readonly RdmaDevice[]>> = {};
  for (const role of ROLES) {
    const [log, host] = [logs[role], hosts[role]];
    if (host !== undefined) given[role] = devicesOf(await readStart(host), host);
    if (log !== undefined) await readStart(log);
  }
  return async () => {
    const found = {
      logs: {} as Partial<Record<Role, LoggedLanes>>,
      reached: {} as Partial<Record<Role, MeasuredTransport>>,
      here: { prefill: false, decode: false },
      devices: { ...given },
    };
    for (const role of ROLES) {
      const log = logs[role];
      if (log !== undefined) found.logs[role] = readLog(await readStart(log));
      const [server] = servers[role];
      if (server === undefined) continue;
      const asked = sideChannel && (await ask(server));
      // A forwarded port is on this host, but its engine may announce another address.
      found.here[role] = isThisHost(asked?.remoteHost ?? readTarget(server.url).host);
      if (found.here[role]) found.devices[role] ??= rdmaDevices(realHost());
      const reached = asked && (await reach(role, asked, sideChannel).catch(() => undefined));
      if (reached !== undefined) found.reached[role] = reached;
    }
    return found;
  };
}

export function readLog(text: string): LoggedLanes {
  const provider = Array.from(text.matchAll(/rails using provider=(\S+)/g)).at(-1)?.[1];
  return { protocols: readUcxProtocols(text), provider };
}

const deviceSchema = z.object({
  name: z.string(),
  efa: z.boolean(),
  link: z.string(),
  ports: z.array(z.string()),
  gigabitsPerSecond: z.number().optional(),
});

/**
 * Reads the output of `kv-nixl doctor --json`.
 *
 * @throws `KV_CONFIG_INVALID` when it is something else.
 */
export function devicesOf(text: string, from: string): readonly RdmaDevice[] {
  const report = doctorReportSchema.safeParse(parseJson(text));
  const checks = report.data?.checks.filter(({ id }) => /^machine\.rdma(\.|$)/.test(id)) ?? [];
  if (checks.length === 0)
    throw new KvError("KV_CONFIG_INVALID", `${from} does not name the RDMA devices of a host`, {
      hint: "write it on that host: npx --no-install kv-nixl doctor --json > host.json",
    });
  return checks.flatMap(({ details }) => deviceSchema.safeParse(details).data ?? []);
}

/** Undefined for a server that answers prefill requests without it. */
function ask(server: EngineServer): Promise<RemotePrefillParams | undefined> {
  return server.prefill(PROBE_PROMPT).then(readRemotePrefill, () => undefined);
}

/** @throws those of its side channel. */
async function reach(
  role: Role,
  remotePrefill: RemotePrefillParams,
  sideChannel: SideChannel,
): Promise<MeasuredTransport | undefined> {
  const { metadata } = await readRankMetadata(sideChannel, sideChannelOf(remotePrefill));
  const ranks = await readAllRanks(sideChannel, remotePrefill, metadata);
  return measureUnlimited(probeRequest({ role, remotePrefill }, metadata, ranks, {}));
}

async function readStart(path: string): Promise<string> {
  try {
    await using file = await open(path);
    const { size } = await file.stat();
    const bytes = Buffer.alloc(Math.min(size, LOG_LIMIT_BYTES));
    const { bytesRead } = await file.read(bytes, 0, bytes.length, 0);
    return bytes.subarray(0, bytesRead).toString("utf8");
  } catch (error) {
    throw new KvError("KV_CONFIG_INVALID", `${path} cannot be read: ${(error as Error).message}`, {
      cause: error,
    });
  }
}
