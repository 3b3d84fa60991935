import type { IncomingHttpHeaders } from "node:http";
import type { Ambient } from "@kv/interface";
import type { Deadline } from "./deadline.js";
import type { Trail } from "./exchange.js";
import type { Instance, Visit } from "./instance.js";
import type { InstancePool } from "./instances.js";
import type { ProxyLimits, ProxyPolicy, ProxyTimeouts } from "./options.js";
import type { GenerationRequest } from "./request-body.js";
import type { RetryPolicy } from "./retry.js";
import type { Tracing } from "./tracing.js";
import type { Upstream, UpstreamAnswer } from "./upstream.js";

/** What goes through prefill and decode at once: one prompt and one copy of its answer. A client's request is one or several. */
export interface Part {
  /** Both legs carry it as `X-Request-Id`. Of several parts each has its own. */
  readonly requestId: string;
  readonly request: GenerationRequest;
  readonly headers: IncomingHttpHeaders;
  readonly deadline: Deadline;
  readonly trail: Trail;
  /** The instance whose prefix cache holds the prompt already, as another copy went there. */
  readonly preferredPrefill?: Instance;
  /** Prefill instances that have failed this part; taken again only where there is no other. */
  readonly avoidPrefill?: ReadonlySet<Instance>;
  /** Decode instances that have failed this part, put in as they do; taken again only where there is no other. */
  readonly avoidDecode?: Set<Instance>;
  /** Called when the prompt is computed, with the instance that did. */
  readonly onPrefilled?: (instance: Instance) => void;
}

/** An instance's answer, looked at as far as is needed to know that it is one; nothing of it has left yet. */
export interface LegAnswer {
  readonly visit: Visit;
  readonly status: number;
  readonly headers: UpstreamAnswer["headers"];
  readonly eventStream: boolean;
  readonly held: Buffer;
  /** What comes after `held`; undefined when that was all. */
  readonly rest: UpstreamAnswer["body"] | undefined;
  /** What the prefill worker said, where its answer has fields that belong into the client's (log probabilities of the prompt). */
  readonly promptAnswer?: Readonly<Record<string, unknown>>;
  discard(): void;
}

/** In which order the legs go, and what passes between them: pull is prefill first, then decode with what it answered. */
export interface LegOrder {
  readonly name: string;
  /**
   * Brings a part as far as an answer of which nothing has left. The visit in it is the caller's to end. A part that ends otherwise
   * (error, deadline) leaves no blocks held that could be freed. Errors: those of the legs, and the deadline's reason.
   */
  run(part: Part): Promise<LegAnswer>;
  /** Resolves when nothing goes on behind a request that has ended, such as the freeing of blocks. */
  settled?(): Promise<void>;
}

/** What an order is made of; `runPrefillLeg`, `runDecodeLeg` and `releaseBlocks` take it as it is. */
export interface LegOrderOptions {
  readonly ambient: Ambient;
  readonly prefillers: InstancePool;
  readonly decoders: InstancePool;
  readonly upstream: Upstream;
  readonly retry: RetryPolicy;
  readonly limits: ProxyLimits;
  readonly timeouts: ProxyTimeouts;
  readonly policy: ProxyPolicy;
  readonly tracing: Tracing;
  /** What asks a prefill worker to keep the KV, JSON text; that of pull by default. */
  readonly askForKv?: string;
  /** Told of the `kv_transfer_params` of each prefill answer, JSON text. */
  readonly onKv?: (instance: Instance, kvTransferParams: string) => void;
}
