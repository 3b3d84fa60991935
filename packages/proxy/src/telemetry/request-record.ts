import type { DisaggregationInputs, DisaggregationReason } from "@kv/fleet";

/** The inputs and the reason of a decision about one leg or two. */
export interface Disaggregation {
  readonly inputs: DisaggregationInputs;
  readonly reason: DisaggregationReason;
}

/**
 * What happened to a request, for the access log, the metrics, the status page and the limit of
 * abandoned work. Times are milliseconds on the proxy's clock. A member stays undefined where the
 * request did not come that far.
 */
export class RequestRecord {
  /** URL of the last prefill instance. */
  prefill: string | undefined = undefined;
  /** URL of the last decode instance. */
  decode: string | undefined = undefined;
  prefillStartedAtMs: number | undefined = undefined;
  /** Duration of the prefill leg. */
  prefillMs: number | undefined = undefined;
  /**
   * Time that prefill instances spent on it, in ms: where one computes for several requests at
   * once, the request's part of it.
   */
  prefillWorkMs = 0;
  decodeStartedAtMs: number | undefined = undefined;
  /** From the begin of the decode leg to the first byte of its answer. */
  firstByteMs: number | undefined = undefined;
  /**
   * Whether the decode leg's answer is an event stream: the first byte of any other answer comes
   * with its last token.
   */
  streamed: boolean | undefined = undefined;
  /**
   * Tokens of the prompt that the prefill instance was expected to have cached; undefined where the
   * routing does not know.
   */
  expectedCachedTokens: number | undefined = undefined;
  /**
   * Tokens of the prompt that it did not compute, by its answer; where that does not say so, those
   * of an ended turn that it read.
   */
  cachedTokens: number | undefined = undefined;
  /** Bytes of the answer's body that left for the client. */
  answerLengthBytes: number | undefined = undefined;
  /** HTTP status of the client's answer. */
  status: number | undefined = undefined;
  /** Parts that the request was split into; undefined for one. */
  parts: number | undefined = undefined;
  /** How often the request began again with the prefill leg. */
  restarts: number | undefined = undefined;
  /** Why the request has one leg or two, where a rule decides. */
  disaggregation: Disaggregation | undefined = undefined;
  /**
   * True when the proxy had blocks of a prefill worker freed, because no decode worker would read
   * them.
   */
  released: boolean | undefined = undefined;
  /**
   * `used`, `lost` where it was used and the request began again, or why no ended turn was used;
   * undefined where the setting is off.
   */
  readback: string | undefined = undefined;
  /** Tokens of an ended turn that the prefill instance did not compute. */
  readbackTokens: number | undefined = undefined;

  /** Records that the request begins again with the prefill leg. */
  restarted(): void {
    this.restarts = (this.restarts ?? 0) + 1;
    this.decodeStartedAtMs = undefined;
    this.cachedTokens = undefined;
    this.readbackTokens = undefined;
    if (this.readback === "used") this.readback = "lost";
  }

  /** The members of the access log. Those that are undefined are not logged. */
  logFields(): Readonly<Record<string, unknown>> {
    return {
      disaggregation: this.disaggregation?.reason,
      prefill: this.prefill,
      decode: this.decode,
      prefillMs: this.prefillMs,
      firstByteMs: this.firstByteMs,
      expectedCachedTokens: this.expectedCachedTokens,
      cachedTokens: this.cachedTokens,
      answerLengthBytes: this.answerLengthBytes,
      status: this.status,
      parts: this.parts,
      restarts: this.restarts,
      released: this.released,
      readback: this.readback,
      readbackTokens: this.readbackTokens,
    };
  }
}
