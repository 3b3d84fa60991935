import type { IncomingHttpHeaders, ServerResponse } from "node:http";
import type { Instance, PooledInstance } from "@kv/fleet";
import type { Deadline, GenerationRequest } from "@kv/fleet/front-end";
import type { Random } from "@kv/interface";
import { withIdSuffix } from "../request/leg-bodies.js";
import type { RequestRecord } from "../telemetry/request-record.js";
import type { Attempts } from "./legs.js";

/** One prompt and one copy of a client's request, which passes through one prefill and one decode leg. */
export interface Part {
  /** Both legs carry it as `X-Request-Id`. Of several parts each has its own. */
  readonly requestId: string;
  readonly request: GenerationRequest;
  /** The client's headers. */
  readonly headers: IncomingHttpHeaders;
  readonly deadline: Deadline;
  readonly attempts: Attempts;
  readonly record: RequestRecord;
  /** Of a sidecar: the prefill instances that the request names, the first available one is chosen. Undefined: all of the pool may serve. */
  readonly prefillers?: readonly PooledInstance[] | undefined;
  /** The prefill instance to choose while it is available: another copy of the prompt went there, so it has the prompt cached. */
  readonly preferredPrefill?: Instance | undefined;
  /** The decode instance to choose while it is available: the decision about the legs was made for it. */
  preferredDecode?: Instance | undefined;
  /** Called when the prompt is computed, with the instance that did it. */
  readonly onPrefilled?: ((instance: Instance) => void) | undefined;
}

/** The part under an id that no other request has. In push the two engines match the legs by it: an id that clients use twice would match another prompt's KV. */
export function underUniqueId(part: Part, random: Random): Part {
  const suffix = `-${random.uuid()}`;
  return {
    ...part,
    requestId: `${part.requestId}${suffix}`,
    request: withIdSuffix(part.request, suffix),
  };
}

/** What a request holds of the proxy's limits. */
export interface Admission {
  /** Counts further parts and the bytes of their bodies. Errors: `KV_PROXY_OVERLOADED`, `KV_REQUEST_INVALID` (413). */
  add(parts: number, lengthBytes: number): void;
}

/** One request of a client, until the last byte of its answer. It is itself the part where it is not split. */
export interface ClientRequest extends Part {
  readonly response: ServerResponse;
  readonly admission?: Admission | undefined;
  /** True when the head of the answer has left, and the answer is an event stream. A failure is then reported as an event. */
  eventStreamStarted: boolean;
}
