import { KvError } from "@kv/interface";

/** What an instance does for a request: compute the prompt's KV cache, or generate from it. */
export type Role = "prefill" | "decode";

/**
 * Identifies an instance among those of its role. The ranks of one data-parallel server share their
 * URL.
 */
export interface InstanceId {
  /** Base URL without a slash at its end, such as `http://p1:8100`. */
  readonly url: string;
  readonly dataParallelRank?: number | undefined;
}

/** The instance's name in logs and errors: `URL`, or `URL@RANK`. */
export function instanceName({ url, dataParallelRank }: InstanceId): string {
  return dataParallelRank === undefined ? url : `${url}@${dataParallelRank}`;
}

/**
 * Configuration of an instance's engine: where its side channel can be read for pairing, and, of a
 * prefill instance, what a decode engine needs to register with it for push before it has
 * responded. An absent member has vLLM's default, or is taken from the instance's responses.
 */
export interface InstanceKv {
  readonly engineId?: string | undefined;
  /** Host of the engine's side channel. @default the host of the instance's URL */
  readonly host?: string | undefined;
  /** Port of the engine's side channel. @default 5600 */
  readonly port?: number | undefined;
  /** Tensor-parallel size of the engine. @default 1 */
  readonly tpSize?: number | undefined;
  /** Pipeline-parallel size of the engine. @default 1 */
  readonly ppSize?: number | undefined;
  /** Decode-context-parallel size of the engine. @default 1 */
  readonly dcpSize?: number | undefined;
}

/** A description of an instance, from a configuration or a discovery. */
export interface InstanceSpec extends InstanceId {
  /** ZMQ endpoint of the instance's KV events, `tcp://host:port`. */
  readonly kvEvents?: string | undefined;
  /** ZMQ endpoint of the replay socket of its KV events, `tcp://host:port`. */
  readonly kvEventsReplay?: string | undefined;
  readonly kv?: InstanceKv | undefined;
  /**
   * Announces which instances it fits, for pairing without its side channel: those with the same
   * label.
   */
  readonly label?: string | undefined;
}

/** An instance as a routing strategy sees it. */
export interface Instance extends InstanceSpec {
  readonly role: Role;
  /** Visits that have begun and not ended. */
  readonly inFlight: number;
}

/** How much the index of an instance knows of its cache, as JSON for status pages. */
export interface KvEventStatus {
  readonly endpoint: string;
  /**
   * `connecting`: no publisher yet; `replaying`: missed batches are being fetched; `following`: it
   * has all batches that came.
   */
  readonly state: "connecting" | "replaying" | "following";
  /** True where the index has seen each event since the cache was empty. */
  readonly complete: boolean;
  /**
   * Batches that the publisher has sent and the index has not seen; null before the first batch.
   */
  readonly missed_batches: number | null;
  readonly next_batch: number;
  readonly blocks: number;
  readonly reason: string | null;
}

/** The state of an instance as JSON, for status pages. */
export interface InstanceStatus {
  readonly url: string;
  /** True in the states `up` and `returning`. */
  readonly available: boolean;
  /**
   * `cooling-down`: left out for a while after a failure; `unreachable`: a health check could not
   * connect, or not resolve its name; `ejected`: by health checks; `returning`: back from ejection
   * with a growing share of the requests; `draining`: takes no more requests.
   */
  readonly state: "up" | "returning" | "cooling-down" | "unreachable" | "ejected" | "draining";
  /** Null for an instance that is not one rank of a data-parallel server. */
  readonly data_parallel_rank: number | null;
  readonly in_flight: number;
  readonly requests: number;
  readonly failures: number;
  /** Visits that failed since the last one that succeeded. */
  readonly consecutive_failures: number;
  /** The last failed visit or health check; null when there was none. */
  readonly last_error: { readonly code: string; readonly message: string } | null;
  /** Which instances of the other role it fits; null without pairing. */
  readonly pairing: PairingStatus | null;
  /**
   * How much is known of its prefix cache; null where it publishes no KV events, or the routing
   * does not use them.
   */
  readonly kv_events: KvEventStatus | null;
}

/** How an instance is paired, as JSON for status pages. A fact that is not known is null. */
export interface PairingStatus {
  /**
   * `paired`: there is an instance that it fits; `unpaired`: there is none, and `reason` says why;
   * `unverified`: its side channel could not be read, and it is paired all the same; `alone`: there
   * is no instance of the other role.
   */
  readonly state: "paired" | "unpaired" | "unverified" | "alone";
  /** How many instances of the other role it fits. */
  readonly partners: number;
  /** Why it fits none, or why it is unverified. */
  readonly reason: string | null;
  /**
   * The values that differ from those of the instance that it nearly fits; of an unpaired instance.
   */
  readonly differences: readonly {
    readonly factor: string;
    readonly prefill: string;
    readonly decode: string;
  }[];
  readonly side_channel: string | null;
  readonly engine_id: string | null;
  readonly compatibility_hash: string | null;
  readonly vllm_version: string | null;
  readonly tp_size: number | null;
  readonly block_size: number | null;
  readonly kv_cache_layout: string | null;
  readonly transfer_mode: string | null;
  /** The engine may have been restarted, and was not read since. */
  readonly stale: boolean;
}

/** One request at one instance. The first of the three calls ends it; later calls do nothing. */
export interface Visit {
  readonly instance: Instance;
  /** The instance did its part. An error that the client caused counts as success. */
  succeeded(): void;
  /**
   * The client disconnected or a time limit ended the request: this says nothing about the
   * instance.
   */
  abandoned(): void;
  /**
   * The instance failed. It cools down where `failureStage(error)` is `connect`, `answer` or
   * `body`.
   */
  failed(error: KvError): void;
}

/**
 * How far an exchange with an instance had come when it failed. `connect`: nothing of the request
 * has left; `answer`: the connection closed before the answer began; `body`: it closed in the
 * middle of the answer; `status`: the answer was a 500, 502, 503 or 504.
 */
export type FailureStage = "connect" | "answer" | "body" | "status";

const STAGES: readonly FailureStage[] = ["connect", "answer", "body", "status"];

/** The `details.stage` of a `KV_PROXY_UPSTREAM_FAILED`; undefined for any other error. */
export function failureStage(error: unknown): FailureStage | undefined {
  if (!KvError.is(error, "KV_PROXY_UPSTREAM_FAILED")) return undefined;
  const { stage } = error.details;
  return STAGES.find((known) => known === stage);
}

/**
 * The header in which an endpoint picker names the prefill instances of a request to a sidecar, as
 * in llm-d: `host:port`, several separated by commas, in order.
 */
export const PREFILLER_HEADER = "x-prefiller-host-port";

/** The same list where all are so: strategies keep what they know of a list. */
export function partOf<T>(list: readonly T[], is: (one: T) => boolean): readonly T[] {
  return list.every(is) ? list : list.filter(is);
}
