import type { AgentMetadata, HandshakePayload, RemotePrefillParams } from "@kv/protocol";
import type { ServedModel } from "../http/engine-server.js";
import type { SideChannelAddress } from "../protocol/handshake.js";
import type { Role } from "./pair-report.js";

/** When a request was sent and when its reply arrived, on the local clock. */
export interface ClockSample {
  readonly sentAtMs: number;
  readonly receivedAtMs: number;
}

/**
 * What a server answers over HTTP. A fact that could not be read is undefined, and a check gives
 * the reason.
 */
export interface HttpFacts {
  readonly vllmVersion: string | undefined;
  readonly model: ServedModel | undefined;
  /** The labels of `vllm:cache_config_info`: cache settings as text. */
  readonly cacheSettings: Readonly<Record<string, string>> | undefined;
  /**
   * How long requests waited in the server's queue (`vllm:request_queue_time_seconds`); undefined
   * when it has no such metric or no requests yet.
   */
  readonly queueTime: { readonly requests: number; readonly p99Seconds: number } | undefined;
  /**
   * The server's wall clock minus the local one, in ms; a range because the `Date` header has whole
   * seconds.
   */
  readonly wallClockMs: { readonly least: number; readonly most: number } | undefined;
  /**
   * The answer to the doctor's own prefill request; the server keeps these blocks for the doctor.
   */
  readonly remotePrefill: RemotePrefillParams | undefined;
}

/** What rank (0, 0) of a server answers on its side channel. */
export interface SideChannelFacts {
  /** Where it answered. */
  readonly address: SideChannelAddress | undefined;
  readonly payload: HandshakePayload | undefined;
  readonly metadata: AgentMetadata | undefined;
  /** The names of the fields that the metadata has on the wire. */
  readonly metadataFields: readonly string[] | undefined;
  readonly clockSamples: readonly ClockSample[];
}

/** Everything that is known about one server of the pair. */
export interface ServerFacts extends HttpFacts, SideChannelFacts {
  readonly role: Role;
}
