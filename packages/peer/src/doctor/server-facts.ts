import type { AgentMetadata, HandshakePayload, RemotePrefillParams } from "@kv/protocol";
import type { Check, Role } from "../checks/report.js";
import type { ServedModel } from "../http/engine-server.js";
import type { SideChannelAddress } from "../protocol/handshake.js";

/** When a request was sent and when its reply arrived, on the local clock. */
export interface ClockSample {
  readonly sentAtMs: number;
  readonly receivedAtMs: number;
}

/** What a server answers over HTTP. A fact that could not be read is absent. */
export interface HttpFacts {
  readonly vllmVersion?: string | undefined;
  readonly model?: ServedModel | undefined;
  /** The labels of `vllm:cache_config_info`: cache settings as text. */
  readonly cacheSettings?: Readonly<Record<string, string>> | undefined;
  /** How long requests waited in its queue (`vllm:request_queue_time_seconds`). */
  readonly queueTime?: { readonly requests: number; readonly p99Seconds: number } | undefined;
  /** Its wall clock minus the local one, in ms; the `Date` header has whole seconds. */
  readonly wallClockMs?: { readonly least: number; readonly most: number } | undefined;
  /** The answer to the doctor's own prefill request, whose blocks the server keeps. */
  readonly remotePrefill?: RemotePrefillParams | undefined;
}

/** What rank (0, 0) of a server answers on its side channel. */
export interface SideChannelFacts {
  readonly address?: SideChannelAddress | undefined;
  readonly payload?: HandshakePayload | undefined;
  readonly metadata?: AgentMetadata | undefined;
  readonly metadataFields?: readonly string[] | undefined;
  readonly clockSamples?: readonly ClockSample[] | undefined;
}

export interface ServerFacts extends HttpFacts, SideChannelFacts {
  readonly role: Role;
  /** Whether each fact could be read. */
  readonly reading?: readonly Check[] | undefined;
}
