import type { IncomingHttpHeaders } from "node:http";
import type { Instance, PooledInstance, Visit } from "@kv/fleet";
import type { Deadline, GenerationRequest } from "@kv/fleet/front-end";
import type { Random } from "@kv/interface";
import { withIdSuffix } from "../request/leg-bodies.js";
import type { AnswerTarget, KvUse, LegAnswer } from "../response/leg-answer.js";
import type { RequestRecord } from "../telemetry/request-record.js";

/**
 * What was tried for one part. Retries are decided by it. The rules: an instance that could not be
 * reached has received nothing, so the next one is tried as long as there is one. A prefill leg
 * that broke off or was answered with a server failure is tried once more: it leaves at most leased
 * blocks behind (once, so that a request that crashes its worker does not crash all). A decode leg
 * is never tried again with the same blocks, as its worker may have told the prefill worker to free
 * them; the part may begin again with the prefill leg, once.
 */
export interface Attempts {
  /** Decode instances that failed; chosen again only when there is no other. */
  readonly failedDecode: Set<Instance>;
  /** Prefill instances to avoid; chosen only when there is no other. */
  failedPrefill: ReadonlySet<Instance>;
  /** How often a prefill leg may be tried again after its request has left. */
  prefillRetries: number;
  /** How often the part may begin again after its decode leg has failed. */
  restarts: number;
}

/**
 * One prompt and one copy of a client's request, which passes through one prefill and one decode
 * leg.
 */
export interface Part {
  /** Both legs carry it as `X-Request-Id`. Of several parts each has its own. */
  readonly requestId: string;
  readonly request: GenerationRequest;
  /** The client's headers. */
  readonly headers: IncomingHttpHeaders;
  readonly deadline: Deadline;
  readonly attempts: Attempts;
  readonly record: RequestRecord;
  /**
   * Of a sidecar: the prefill instances that the request names, the first available one is chosen.
   * Undefined: all of the pool may serve.
   */
  readonly prefillers?: readonly PooledInstance[] | undefined;
  /**
   * The prefill instance to choose while it is available: another copy of the prompt went there, so
   * it has the prompt cached.
   */
  readonly preferredPrefill?: Instance | undefined;
  /**
   * The decode instance to choose while it is available: the decision about the legs was made for
   * it.
   */
  preferredDecode?: Instance | undefined;
  /** One of several prompts or copies of a request. */
  readonly isSplit?: boolean | undefined;
  /** Reads an answer of its decode leg, and returns what goes on to the client. */
  readonly readAnswer?: ((answer: LegAnswer) => LegAnswer) | undefined;
  /** Called when the prompt is computed, with the instance that did it. */
  readonly onPrefilled?: ((instance: Instance) => void) | undefined;
}

/**
 * The part under an id that no other request has. In push the two engines match the legs by it: an
 * id that clients use twice would match another prompt's KV.
 */
export function underUniqueId(part: Part, random: Random): Part {
  const suffix = `-${random.uuid()}`;
  return {
    ...part,
    requestId: `${part.requestId}${suffix}`,
    request: withIdSuffix(part.request, suffix),
  };
}

/** How a decode leg is run. */
export interface DecodeLegOptions {
  /** The prefill instance whose KV the leg reads: only decode instances that fit it are chosen. */
  readonly prefill?: Instance | undefined;
  /**
   * Until when the prefill worker surely holds the blocks, on the proxy's clock. After that nothing
   * is sent: `KV_LEASE_EXPIRED`.
   */
  readonly leaseEndsAtMs?: number | undefined;
  /** Learns what the leg shows of that KV. */
  readonly use?: KvUse | undefined;
}

/** Why one instance serves a part. */
export type SingleLeg = "no-kv" | "unsplittable" | "one-leg-pays" | "unnamed" | "prompt-only";

/** How a prefill leg is run. */
export interface PrefillLegOptions {
  /** This instance is visited, and no other. */
  readonly only?: Visit | undefined;
  /** Tokens of an ended turn that the leg is to read from a decode instance. */
  readonly readTokens?: number | undefined;
  /** The leg's time limit. Default: that of the settings. */
  readonly limitMs?: number | undefined;
}

/** What a request holds of the proxy's limits. */
export interface Admission {
  /**
   * Counts further parts and the bytes of their bodies.
   * @throws `KV_PROXY_OVERLOADED`, `KV_REQUEST_INVALID` (413).
   */
  add(parts: number, lengthBytes: number): void;
}

/**
 * One request of a client, until the last byte of its answer. It is itself the part where it is not
 * split.
 */
export interface ClientRequest extends Part, AnswerTarget {
  readonly admission?: Admission | undefined;
}
