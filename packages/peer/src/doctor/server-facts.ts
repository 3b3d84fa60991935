import type { AgentMetadata, HandshakePayload, RemotePrefillParams } from "@kv/protocol";
import type { Check, Role } from "../checks/report.js";
import type { ServedModel } from "../http/engine-server.js";
import type { SideChannelAddress } from "../protocol/remote-engine.js";

export interface ClockSample {
  readonly sentAtMs: number;
  readonly receivedAtMs: number;
}

export interface HttpFacts {
  readonly vllmVersion?: string | undefined;
  readonly model?: ServedModel | undefined;
  /** From `vllm:cache_config_info`. */
  readonly cacheSettings?: Readonly<Record<string, string>> | undefined;
  /** From `vllm:request_queue_time_seconds`. */
  readonly queueTime?: { readonly requests: number; readonly p99Seconds: number } | undefined;
  /** The server keeps blocks of the doctor's request. */
  readonly remotePrefill?: RemotePrefillParams | undefined;
}

export interface SideChannelFacts {
  readonly address?: SideChannelAddress | undefined;
  readonly payload?: HandshakePayload | undefined;
  readonly metadata?: AgentMetadata | undefined;
  readonly metadataFields?: readonly string[] | undefined;
  readonly clockSamples?: readonly ClockSample[] | undefined;
}

export interface ServerFacts extends HttpFacts, SideChannelFacts {
  readonly role: Role;
  readonly reading?: readonly Check[] | undefined;
}
