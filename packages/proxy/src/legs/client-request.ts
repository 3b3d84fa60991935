import type { IncomingHttpHeaders } from "node:http";
import type { Instance, PooledInstance } from "@kv/fleet";
import type { Deadline, GenerationRequest, KvHolder } from "@kv/fleet/front-end";
import type { AnswerTarget, LegAnswer } from "../response/leg-answer.js";
import type { RequestRecord } from "../telemetry/request-record.js";
import type { Attempts } from "./tries.js";

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
