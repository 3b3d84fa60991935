import { KvError } from "@kv/interface";

/** A prefill instance computes the prompt's KV cache; a decode instance generates from it. */
export type Role = "prefill" | "decode";

/** Unique within its role. The ranks of one server share their URL. */
export interface InstanceId {
  /** Base URL without a final slash, such as `http://p1:8100`. */
  readonly url: string;
  readonly dataParallelRank?: number | undefined;
}

/** `URL`, or `URL@RANK`, for logs and errors. */
export function instanceName({ url, dataParallelRank }: InstanceId): string {
  return dataParallelRank === undefined ? url : `${url}@${dataParallelRank}`;
}

/**
 * An instance's engine: its side channel, and a decode engine's registration for push. Absent
 * members have vLLM's default or come from responses.
 */
export interface InstanceKv {
  readonly engineId?: string | undefined;
  /** Of the side channel. @default the host of the instance's URL */
  readonly host?: string | undefined;
  /** Of the side channel. @default 5600 */
  readonly port?: number | undefined;
  /** @default 1 */
  readonly tpSize?: number | undefined;
  /** @default 1 */
  readonly ppSize?: number | undefined;
  /** @default 1 */
  readonly dcpSize?: number | undefined;
}

/** An instance as configured or discovered. */
export interface InstanceSpec extends InstanceId {
  /** ZMQ endpoint, `tcp://host:port`. */
  readonly kvEvents?: string | undefined;
  /** Of the replay socket. */
  readonly kvEventsReplay?: string | undefined;
  readonly kv?: InstanceKv | undefined;
  /** Instances with the same label fit if a side channel is not read. */
  readonly label?: string | undefined;
}

/** An instance for a routing strategy. */
export interface Instance extends InstanceSpec {
  readonly role: Role;
  readonly inFlight: number;
}

/** What is known of an instance's cache, for status pages. */
export interface KvEventStatus {
  readonly endpoint: string;
  /**
   * `connecting`: no publisher yet; `replaying`: missed batches are being fetched; `following`: up
   * to date.
   */
  readonly state: "connecting" | "replaying" | "following";
  /** All events since the cache was empty were seen. */
  readonly complete: boolean;
  /** Null before the first batch. */
  readonly missed_batches: number | null;
  readonly next_batch: number;
  readonly blocks: number;
  readonly reason: string | null;
}

/** The state of an instance, for status pages. */
export interface InstanceStatus {
  readonly url: string;
  /** True when `up` or `returning`, and when `half-open` without a visit. */
  readonly available: boolean;
  /**
   * `cooling-down`: out for a while after a failed connection; `unreachable`: a health check could
   * not connect or resolve the name; `ejected`: by health checks, or for a while by failed requests
   * in a row; `half-open`: after that while, tried by one request at a time; `returning`: takes a
   * growing share of requests; `warming`: fetches prompts before it takes load; `draining`: takes no more requests.
   */
  readonly state:
    | "up"
    | "returning"
    | "cooling-down"
    | "unreachable"
    | "ejected"
    | "half-open"
    | "warming"
    | "draining";
  /** Null without a rank. */
  readonly data_parallel_rank: number | null;
  readonly in_flight: number;
  readonly requests: number;
  readonly failures: number;
  /** Since the last success. */
  readonly consecutive_failures: number;
  readonly ejections: number;
  /** Of a visit or health check. */
  readonly last_error: { readonly code: string; readonly message: string } | null;
  /** Null without pairing. */
  readonly pairing: PairingStatus | null;
  /** Null without KV events, or if routing ignores them. */
  readonly kv_events: KvEventStatus | null;
}

/** How an instance is paired, for status pages. Unknown facts are null. */
export interface PairingStatus {
  /**
   * `paired`: it fits an instance; `unpaired`: it fits none, for `reason`; `unverified`: paired
   * although its side channel was not readable; `alone`: the other role has no instance.
   */
  readonly state: "paired" | "unpaired" | "unverified" | "alone";
  readonly partners: number;
  /** Set if unpaired or unverified. */
  readonly reason: string | null;
  /** From the instance that it nearly fits. */
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
  /** The engine may have restarted since it was read. */
  readonly stale: boolean;
}

/** One request at one instance. The first of the three calls ends it; later ones do nothing. */
export interface Visit {
  readonly instance: Instance;
  /** The instance did its part. Errors of the client count as success. */
  succeeded(): void;
  /** The client or a time limit ended the request, which says nothing of the instance. */
  abandoned(): void;
  /**
   * The instance failed; several failures in a row may eject it. It cools down at once if
   * `failureStage(error)` is `connect`, `answer` or `body`.
   */
  failed(error: KvError): void;
}

/**
 * When an exchange failed. `connect`: before any of the request left; `answer`: before the answer;
 * `body`: within the answer; `status`: the answer was 500, 502, 503 or 504.
 */
export type FailureStage = "connect" | "answer" | "body" | "status";

const STAGES: readonly FailureStage[] = ["connect", "answer", "body", "status"];

/** The `details.stage` of a `KV_PROXY_UPSTREAM_FAILED`, else undefined. */
export function failureStage(error: unknown): FailureStage | undefined {
  if (!KvError.is(error, "KV_PROXY_UPSTREAM_FAILED")) return undefined;
  const { stage } = error.details;
  return STAGES.find((known) => known === stage);
}

/**
 * An endpoint picker names prefill instances to a sidecar in this header, as in llm-d: `host:port`,
 * several in order, separated by commas.
 */
export const PREFILLER_HEADER = "x-prefiller-host-port";

/** Names who has the prompt's start: an instance, as with llm-d, or a pool's P2P tier. */
export const KV_SOURCE_HEADER = "x-kv-cache-source-host-port";

/** `host:port` of a URL. An IPv6 address has brackets. */
export function addressOf(url: string): string {
  const { hostname, port, protocol } = new URL(url);
  return `${hostname}:${port || (protocol === "https:" ? 443 : 80)}`;
}

/** The host of a URL. An IPv6 address has no brackets. */
export function hostOf(url: string): string {
  return new URL(url).hostname.replace(/^\[|\]$/g, "");
}

/** Returns the same list if all stay, because strategies keep state by list. */
export function partOf<T>(list: readonly T[], is: (one: T) => boolean): readonly T[] {
  return list.every(is) ? list : list.filter(is);
}
