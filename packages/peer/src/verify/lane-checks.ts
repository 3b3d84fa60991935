import type { RdmaDevice, UcxProtocol } from "@kv/nixl";
import { type Check, check, type Role } from "../checks/report.js";
import {
  active,
  gigabytes,
  LANE_CLASSES,
  type Lane,
  laneNamed,
  laneOf,
  type MeasuredTransport,
} from "../doctor/memory/transport-check.js";
import type { EngineCounters } from "./counters.js";
import type { SeenDeployment } from "./verify-checks.js";

/** What a server's log says about its lanes. */
export interface LoggedLanes {
  /** Of UCX with `UCX_PROTO_INFO=y`. */
  readonly protocols: readonly UcxProtocol[];
  /** The provider of LIBFABRIC with `NIXL_LOG_LEVEL=INFO`. */
  readonly provider: string | undefined;
}

/** What is known about the way of the bytes between P and D. Each part may be unknown. */
export interface LaneEvidence {
  readonly logs: Partial<Record<Role, LoggedLanes>>;
  /** How this host read the memory of a server over all transports that both permit. */
  readonly reached: Partial<Record<Role, MeasuredTransport>>;
  readonly here: Readonly<Record<Role, boolean>>;
  readonly devices: Partial<Record<Role, readonly RdmaDevice[]>>;
}

const [TCP, RDMA, SHARED_MEMORY] = LANE_CLASSES.map((_, rank) => rank) as [number, number, number];
/**
 * vLLM looks for the end of a transfer once in an engine step, so the times of shorter ones say
 * nothing about the lane.
 */
const LEAST_MEAN_MS = 100;
/** A lane that gives less than this share of what it can is another one, or limited. */
const LEAST_SHARE = 0.1;
const LONG_POST_MS = 5;

/** Which lane carried the KV, against the best that both hosts have, and how fast. */
export function laneChecks({
  deployment: { totals },
  lane: evidence,
}: {
  readonly deployment: SeenDeployment;
  readonly lane: LaneEvidence;
}): Check[] {
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
  const of = (
    id: string,
    title: string,
    status: Check["status"],
    found: string,
    fix?: string,
  ): Check => check(`lane.${id}`, title, status, found, { fix, details: { lane, best, ...speed } });
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
 * The lane that the posting side's log names. Without it, where both servers run on this host: the
 * worse of those by which this host reaches them, because both must permit a lane.
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
  /**
   * What the lane should give: as fast as this host read P's memory, or as the slower device;
   * undefined where neither is known.
   */
  readonly expectedBytesPerMs: number | undefined;
  readonly expectation: string;
  readonly share: number | undefined;
  readonly meanMs: number;
  readonly postShare: number;
  /** The transfers took long enough for their times to mean something. */
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
  // A host that is not D's may reach P by another way.
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
      ? check("lane.slow", "slow", "warn", found, {
          fix: "compare with kv-peer doctor on D's host; small descriptors, a busy NIC and a limit of UCX_MAX_RNDV_RAILS are usual causes",
        })
      : check("lane.bandwidth", "bandwidth", "ok", found),
    lane?.rank !== SHARED_MEMORY && postShare > 0.5 && meanPostMs > LONG_POST_MS
      ? check("lane.posting", "post time", "warn", post, {
          fix: "fewer and larger descriptors: equal block sizes and layouts on both sides; kv-plan shows what merges them (vllm-project/vllm#55434)",
        })
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
