import type { RegionIndexing } from "../engine/descriptor-tables.js";
import type { EngineTransferPlan } from "../engine/engine-plan.js";
import type { SegmentPlan } from "../engine/source-plans.js";
import type { RankGeometry, RegionGeometry } from "../geometry/rank-geometry.js";
import type { RequestBlocks } from "../request/request-blocks.js";
import { planRequest, type RemoteRankId, type RequestPlan } from "../request/request-plan.js";
import { blockBytes } from "./block-labels.js";
import { regionsHolding } from "./cache-semantics.js";
import type { DescriptorLookup } from "./descriptors.js";
import { FoundFault, fail, type ProofResult } from "./proof-result.js";
import { counterpart, type ProofSubject, proofSubject } from "./proof-subject.js";
import { proveRequest } from "./prove-request.js";
import { sampleRequests } from "./sample-requests.js";
import { proveStages, type Stagings } from "./staging.js";

/** One request to prove. */
export interface ProofRequest {
  readonly blocks: RequestBlocks;
  /** @default the result of `planRequest` */
  readonly plan?: RequestPlan | undefined;
}

/** Options of `provePlan`. */
export interface ProveOptions {
  /** Ranks of the remote engine, at least those that the plan reads. */
  readonly remotes: readonly RankGeometry[];
  /** KV heads of the whole model. Ignored for MLA. */
  readonly numKvHeads: number;
  /** KV heads by group, where they differ. @default numKvHeads */
  readonly groupKvHeads?: readonly number[] | undefined;
  /**
   * Copies between device and registered memory, equal on all ranks; the proof then goes from
   * device to device.
   */
  readonly staging?: Stagings | undefined;
  /** @default sampleRequests */
  readonly requests?: readonly ProofRequest[] | undefined;
}

/** Options of `proveEnginePlans`. */
export interface ProveEngineOptions extends Omit<ProveOptions, "requests"> {
  /**
   * Requests with their plans by local rank. @default `sampleRequests`, and the results of
   * `planRequest`
   */
  readonly requests?: readonly EngineRequest[] | undefined;
}

interface EngineRequest {
  readonly blocks: RequestBlocks;
  readonly plans?: readonly RequestPlan[] | undefined;
}

/**
 * Proves that the plan of one local rank is right, or returns the first fault, which is no error.
 * It labels every byte of the remote caches, moves the labels as tables, requests and receive pass
 * say, and compares them with what geometry and layout demand, without the planner's code.
 *
 * @throws The errors of `planRequest` and `sampleRequests`.
 */
export function provePlan(plan: EngineTransferPlan, options: ProveOptions): ProofResult {
  const requests = options.requests?.map(({ blocks, plan: given }) => ({
    blocks,
    plans: given && [given],
  }));
  return prove([plan], { ...options, requests }, false);
}

/**
 * As `provePlan`, for one plan of each local rank. It also proves that each remote rank gets
 * exactly the notifications that it awaits.
 *
 * @throws The errors of `planRequest` and `sampleRequests`.
 */
export function proveEnginePlans(
  plans: readonly EngineTransferPlan[],
  options: ProveEngineOptions,
): ProofResult {
  return prove(plans, options, true);
}

function prove(
  plans: readonly EngineTransferPlan[],
  options: ProveEngineOptions,
  isWholeEngine: boolean,
): ProofResult {
  const { remotes, staging } = options;
  try {
    const [first] = plans;
    const asked: readonly EngineRequest[] =
      options.requests ?? (first === undefined ? [] : sampleRequests(first));
    const requests = asked.map(({ blocks, plans: given }) => ({
      blocks,
      plans: given ?? plans.map((plan) => planRequest(plan, blocks)),
    }));
    const subjects = plans.map((plan) => proofSubject(plan, remotes, options));

    let [descriptors, blocks, patterns] = [0, 0, 0];
    for (const subject of subjects) {
      descriptors += proveTables(subject);
      if (staging !== undefined) proveStages(subject, staging);
    }
    for (const [index, subject] of subjects.entries()) {
      const proven = new Set<string>();
      for (const request of requests)
        blocks += proveRequest(
          subject,
          request.blocks,
          request.plans[index] as RequestPlan,
          proven,
        );
      patterns += proven.size;
    }
    for (const request of requests) {
      const notified = plans.map((plan, index) =>
        notifiedRanks(plan, request.plans[index] as RequestPlan),
      );
      if (isWholeEngine) proveNotifications(plans, remotes, notified);
    }
    return {
      proven: true,
      statements: statementsOf(isWholeEngine, staging !== undefined),
      assumed: assumptionsOf(subjects, staging !== undefined),
      extent: { descriptors, requests: requests.length, blocks, patterns },
    };
  } catch (error) {
    if (error instanceof FoundFault) return { proven: false, fault: error.fault };
    throw error;
  }
}

function statementsOf(isWholeEngine: boolean, isStaged: boolean): readonly string[] {
  return [
    "every block of every region has descriptors, and they lie at the same place within each block",
    "in the given requests, every byte that is needed comes exactly once from the source byte of the same layer, K or V, head and token",
    "only blocks of the request are written, and only blocks of the request are read",
    "tokens beyond the request are zeroed, unless the plan leaves them to be masked",
    ...(isStaged
      ? [
          "staging: each byte of a block on the wire is one byte of the device's block, of the same head, token and place, and no byte of the device is left out",
        ]
      : []),
    isWholeEngine
      ? "each remote rank gets exactly the notifications that it awaits"
      : "this rank notifies no remote rank twice",
  ];
}

function assumptionsOf(subjects: readonly ProofSubject[], isStaged: boolean): readonly string[] {
  const assumed = new Set<string>();
  if (isStaged) assumed.add("both copies pair a device block with the same pool block");
  for (const { plan, contents } of subjects) {
    const { conversions, local, remote, uncovered, groups } = plan;
    if (conversions.includes("attention-order"))
      assumed.add(
        `the engine repacks the inside of a head from ${remote.attentionBackend} to ${local.attentionBackend}`,
      );
    // The pass zeroes no part of a block that does not divide into tokens.
    const isCompressed = [...groups.keys()].some((group) =>
      regionsHolding(local, group).some(
        (region) => contents(region, group).local.tokensPerStep > 1,
      ),
    );
    if (uncovered === "masked") assumed.add("the engine masks tokens beyond a request's last");
    else if (isCompressed)
      assumed.add(
        "the engine masks tokens beyond a request's last in the last block of compressed latents",
      );
  }
  return [...assumed];
}

/**
 * Each part has a descriptor at the same place within every block, so the proof of a sampled
 * request holds for any blocks.
 */
function proveTables({ plan, remotes, lookups }: ProofSubject): number {
  let descriptors = 0;
  for (const [index, source] of plan.sources.entries()) {
    const rank = remotes[index] as RankGeometry;
    for (const number of source.segments) {
      const segment = plan.segments[number];
      const region = plan.local.regions[segment?.region ?? -1];
      const remoteRegion = region && counterpart(region, rank, plan.local);
      const lookup = lookups[index]?.[segment?.list ?? -1];
      const [mine, theirs] = [plan.localIndexing[number], source.remoteIndexing[number]];
      if (!segment || !lookup || !mine || !theirs || remoteRegion === undefined)
        fail(
          "descriptor-step",
          `segment ${number} of the source at rank ${rank.tpRank} has no descriptors`,
          { segment: number },
        );
      const { region: own, localParts, remoteParts } = segment;
      proveSegment("local", plan.local, own, segment, mine, localParts, lookup.local);
      const owner = `remote rank ${rank.tpRank}`;
      proveSegment(owner, rank, remoteRegion, segment, theirs, remoteParts, lookup.remote);
    }
    for (const { local, remote } of lookups[index] ?? []) descriptors += local.count + remote.count;
  }
  return descriptors;
}

/** Descriptors of a row are evenly spaced, so the first, second and last decide for all. */
function proveSegment(
  owner: string,
  rank: RankGeometry,
  index: number,
  { unit, piece, lengthBytes }: SegmentPlan,
  { offset, blockStep, partStep }: RegionIndexing,
  parts: number,
  lookup: DescriptorLookup,
): void {
  const region = rank.regions[index] as RegionGeometry;
  const kernelBlocks = unit === "kernel-block" ? 1 : rank.physicalBlocksPerLogical;
  const strideBytes = region.blockStrideBytes * kernelBlocks;
  const bytes = blockBytes(region, { kernelBlocks, usesPadding: unit === "logical-block" });
  const count = Math.floor(region.numBlocks / kernelBlocks);
  const begin = lookup.place(offset).from;
  const partBytes = parts === 1 ? 0 : lookup.place(offset + partStep).from - begin;
  for (let part = 0; part < parts; part++) {
    const into = begin + part * partBytes;
    const id = (block: number) => offset + block * blockStep + part * partStep;
    const isOneRow = lookup.rowIndex(id(0)) === lookup.rowIndex(id(count - 1));
    const looked = isOneRow ? [0, Math.min(1, count - 1), count - 1] : [...Array(count).keys()];
    for (const block of looked) {
      const place = lookup.place(id(block));
      const expected = block * strideBytes + into;
      const isRight =
        place.region === index &&
        place.from === expected &&
        place.lengthBytes === lengthBytes &&
        into >= 0 &&
        into + lengthBytes <= bytes;
      if (isRight) continue;
      const name = `"${region.name}" ${piece}`.trim();
      fail(
        "descriptor-step",
        `${owner}: part ${part} of block ${block} of ${name} is ${place.lengthBytes} bytes at ${place.from} of region ` +
          `${place.region}; expected ${lengthBytes} bytes at ${expected} of region ${index}, within a block of ${bytes}`,
        { region: index, block, part },
      );
    }
  }
}

const nameOf = ({ tpRank, ppRank }: RemoteRankId) =>
  ppRank === 0 ? `${tpRank}` : `${tpRank} of stage ${ppRank}`;

function notifiedRanks(
  { local: { tpRank: localRank }, remote: { tpSize } }: EngineTransferPlan,
  { reads, notify }: RequestPlan,
): Set<string> {
  // Several transfers to one rank (one for each type of memory) notify it once.
  const notified = new Set(
    reads.map(({ remoteRank, remotePpRank }) =>
      nameOf({ tpRank: remoteRank, ppRank: remotePpRank }),
    ),
  );
  for (const rank of notify) {
    const name = nameOf(rank);
    const at = { localRank, remoteRank: rank.tpRank, stage: rank.ppRank };
    if (notified.has(name))
      fail(
        "notification-twice",
        `local rank ${localRank} notifies remote rank ${name} more than once`,
        at,
      );
    if (rank.tpRank < 0 || rank.tpRank >= tpSize)
      fail(
        "notification-stray",
        `local rank ${localRank} notifies rank ${name}, and the remote engine has ${tpSize} ranks`,
        at,
      );
    notified.add(name);
  }
  return notified;
}

/** A remote rank frees the blocks after the number of notifications that each of them names. */
function proveNotifications(
  plans: readonly EngineTransferPlan[],
  remotes: readonly RankGeometry[],
  notified: readonly ReadonlySet<string>[],
): void {
  for (const { tpRank: remoteRank, ppRank = 0 } of remotes) {
    const name = nameOf({ tpRank: remoteRank, ppRank });
    const awaited = plans
      .filter((_, index) => notified[index]?.has(name))
      .map(({ localConsumers }) => localConsumers);
    const [one, sent] = [awaited[0], awaited.length];
    if (one === undefined)
      fail(
        "notification-missing",
        `remote rank ${name} holds the request's blocks and gets no notification`,
        { remoteRank },
      );
    const other = awaited.find((count) => count !== one);
    if (other !== undefined)
      fail(
        "notification-count",
        `notifications tell remote rank ${name} to await ${one} and ${other} notifications`,
        { remoteRank, one, other },
      );
    if (one !== sent)
      fail(
        sent < one ? "notification-missing" : "notification-count",
        `remote rank ${name} gets ${sent} notifications about a request and awaits ${one}`,
        { remoteRank, awaited: one, sent },
      );
  }
}
