import type { Engine } from "../engine/engine.js";
import type { Tokenizer } from "../model/tokenizer.js";

/** What the HTTP surface needs of the instance behind it. */
export interface ServedInstance {
  readonly engine: Pick<Engine, "submit" | "outstanding">;
  readonly tokenizer: Tokenizer;
  /** Names that a client may give as `model`; the first is shown. */
  readonly modelNames: readonly string[];
  readonly maxModelLen: number;
  readonly maxOutputTokens: number;
  /** Takes `kv_demo_zero_block`. */
  readonly debug: boolean;
  /** Called with the engine's request id before it is submitted, when the body asks to damage a block. */
  zeroBlockOf(requestId: string, block: number): void;
  /** False while it starts or drains. */
  ready(): boolean;
  status(): object;
  /** Counters and histograms in Prometheus' text format. */
  metrics(): string;
  /** KV sent and received lately, with digests. */
  kvTransfers(): object;
}
