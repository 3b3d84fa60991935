import type { IncomingHttpHeaders } from "node:http";
import type { Instance, PooledInstance, Visit } from "@kv/fleet";
import type { Deadline, GenerationRequest, KvHolder } from "@kv/fleet/front-end";
import type { Random } from "@kv/interface";
import { withIdSuffix } from "../request/leg-bodies.js";
import type { AnswerTarget, LegAnswer } from "../response/leg-answer.js";
import type { RequestRecord } from "../telemetry/request-record.js";
import type { Attempts, HeldBlocks } from "./tries.js";

/** What all legs of a request, or of one part, share. */
export interface Requester {
  /** Legs carry it as `X-Request-Id`. */
  readonly requestId: string;
  readonly headers: IncomingHttpHeaders;
  readonly deadline: Deadline;
  readonly attempts: Attempts;
  readonly record: RequestRecord;
}

export interface ClientRequest extends Requester, AnswerTarget {
  /**
   * Counts further parts and their bytes.
   * @throws `KV_PROXY_OVERLOADED`, `KV_REQUEST_INVALID` (413).
   */
  grow(parts: number, lengthBytes: number): void;
}

/** One prompt and one copy of a request, with its own id, prefill leg and decode leg. */
export interface Part extends Requester {
  readonly request: GenerationRequest;
  /**
   * Prefill instances that a sidecar's request names; the first available one serves. Undefined:
   * any.
   */
  readonly prefillers?: readonly PooledInstance[] | undefined;
  /** Who has the prompt's start. */
  readonly kvHolders?: readonly KvHolder[] | undefined;
  /** Chosen while available: another copy left the prompt in its cache. */
  readonly preferredPrefill?: Instance | undefined;
  /** Chosen while available: the number of legs was decided for it. */
  preferredDecode?: Instance | undefined;
  readonly isSplit?: boolean | undefined;
  /** Returns what of the decode leg's answer goes on to the client. */
  readonly readAnswer?: ((answer: LegAnswer) => LegAnswer) | undefined;
  /** Called with the instance that computed the prompt. */
  readonly onPrefilled?: ((instance: Instance) => void) | undefined;
}

/**
 * In push the engines match legs by id, so an id that clients reuse would match another prompt's
 * KV.
 */
export function underUniqueId(part: Part, random: Random): Part {
  const suffix = `-${random.uuid()}`;
  return {
    ...part,
    requestId: `${part.requestId}${suffix}`,
    request: withIdSuffix(part.request, suffix),
  };
}

export interface DecodeLegKv {
  /** P's KV parameters as JSON text. */
  readonly params: string;
  /** Whose KV the leg reads. Only decode instances that fit it are chosen. */
  readonly prefill: Instance;
  /** Learns what the leg does with that KV. */
  readonly held: HeldBlocks;
  /**
   * Until when P surely holds the blocks, on the proxy's clock. Later tries end with
   * `KV_LEASE_EXPIRED`.
   */
  readonly leaseEndsAtMs?: number | undefined;
}

/** Why one instance serves a part. */
export type SingleLeg = "no-kv" | "unsplittable" | "one-leg-pays" | "unnamed" | "asks-about-prompt";

export interface PrefillLegOptions {
  /** Visits this instance once, and no other. */
  readonly only?: Visit | undefined;
  /** Tokens of an ended turn that P reads from D. */
  readonly readTokens?: number | undefined;
  /** Default: the time limit of the settings. */
  readonly limitMs?: number | undefined;
}
