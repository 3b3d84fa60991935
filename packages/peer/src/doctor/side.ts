import type { ClockSample } from "@kv/connector/building-blocks";
import type { AgentMetadata, HandshakePayload, RemotePrefillParams } from "@kv/protocol";
import type { Target } from "./target.js";

export type Role = "prefill" | "decode";

/** What was found out about one side of the pair. What could not be is undefined, and a check says why. */
export interface Side {
  readonly role: Role;
  readonly target: Target;
  readonly vllmVersion: string | undefined;
  readonly model: { readonly id: string; readonly root: string | undefined } | undefined;
  /** Labels of `vllm:cache_config_info`: settings of the server as text. */
  readonly cacheSettings: Readonly<Record<string, string>> | undefined;
  /** Its wall clock minus ours; the header that tells it has whole seconds, hence a range. */
  readonly wallClockMs: { readonly least: number; readonly most: number } | undefined;
  /** What it told a decode worker about blocks that it keeps for this check. */
  readonly told: RemotePrefillParams | undefined;
  readonly address: { readonly host: string; readonly port: number } | undefined;
  /** Of rank (0, 0). */
  readonly payload: HandshakePayload | undefined;
  readonly metadata: AgentMetadata | undefined;
  readonly clockSamples: readonly ClockSample[];
}
