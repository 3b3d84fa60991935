import {
  bodyLength,
  type GenerationRequest,
  promptIds,
  writtenIds,
} from "../request/generation-request.js";
import type { InstancePool } from "./instance-pool.js";

/** A prefill leg that has ended with a computed prompt. */
export interface EndedPrefill {
  readonly request: GenerationRequest;
  readonly usage: unknown;
  /**
   * Tokens of the prompt that were cached, where the answer says it elsewhere than in its usage.
   */
  readonly cachedTokens?: number | undefined;
  /**
   * Tokens that were given to the instance to read from a decode instance; undefined where there
   * were none.
   */
  readonly readTokens?: number | undefined;
  readonly durationMs: number;
  /** No other leg was at the instance when it began. */
  readonly wasAlone: boolean;
}

/** How much one more measurement counts. */
const WEIGHT = 0.1;

/** What prompts cost at prefill instances, as moving averages of the legs that have ended. */
export class PrefillCosts {
  #charactersPerToken = 4;
  #msPerLeg: number | undefined = undefined;
  readonly #fit = new LineFit();
  #readMsPerToken: number | undefined = undefined;

  /** Characters of a request's text in a token of its prompt: 4 before the first measurement. */
  get charactersPerToken(): number {
    return this.#charactersPerToken;
  }

  /**
   * Milliseconds that one token more takes which is not cached; undefined before the first
   * measurement.
   */
  get msPerToken(): number | undefined {
    return this.#fit.slope;
  }

  /**
   * The time of a leg that computes `computedTokens` and waits for no other leg, in milliseconds;
   * undefined before the first measurement.
   */
  legMs(computedTokens: number): number | undefined {
    return this.#fit.at(computedTokens);
  }

  /**
   * How long a prefill instance takes to read `readTokens` from a decode instance and to compute
   * the rest of `promptTokens`, in milliseconds; undefined before the first measurement.
   */
  readingMs(promptTokens: number, readTokens: number): number | undefined {
    const { msPerToken } = this;
    if (msPerToken === undefined) return undefined;
    return (
      msPerToken * Math.max(0, promptTokens - readTokens) + (this.#readMsPerToken ?? 0) * readTokens
    );
  }

  /**
   * Tokens of the prompt: exact for token ids, else estimated; undefined for a prompt without text.
   */
  promptTokens(request: GenerationRequest): number | undefined {
    const ids = promptIds(request);
    if (ids !== undefined) return ids.length;
    if (request.fields.prompt_embeds != null) return undefined;
    return Math.ceil(bodyLength(request) / this.#charactersPerToken);
  }

  /**
   * How long a prompt waits for the least loaded of the prefill instances; undefined before the
   * first measurement.
   */
  waitMs(prefillers: InstancePool): number | undefined {
    if (this.#msPerLeg === undefined) return undefined;
    const least = prefillers.fewestInFlight();
    return least === undefined ? undefined : least * this.#msPerLeg;
  }

  /** Takes a leg into the averages. Of an answer without usage only the duration counts. */
  ended(leg: EndedPrefill): void {
    const { request, usage, durationMs, wasAlone, readTokens } = leg;
    const { promptTokens } = usageOf(usage);
    const cachedTokens = uncomputedTokens(leg) ?? 0;
    if (wasAlone) this.#msPerLeg = average(this.#msPerLeg, durationMs);
    if (promptTokens === undefined || promptTokens === 0) return;
    if (writtenIds(request) === undefined)
      this.#charactersPerToken = average(
        this.#charactersPerToken,
        bodyLength(request) / promptTokens,
      );
    const computed = promptTokens - cachedTokens;
    if (!wasAlone || computed <= 0) return;
    if (readTokens === undefined) {
      this.#fit.add(computed, durationMs);
      return;
    }
    // What is not computing is the READ.
    const computeMs = this.legMs(computed);
    const read = Math.min(readTokens, cachedTokens);
    if (computeMs === undefined || read === 0) return;
    this.#readMsPerToken = average(
      this.#readMsPerToken,
      Math.max(0, durationMs - computeMs) / read,
    );
  }
}

/** Tokens of a leg's prompt that the instance did not compute; undefined where nothing says so. */
export function uncomputedTokens({
  usage,
  cachedTokens,
  readTokens,
}: EndedPrefill): number | undefined {
  return cachedTokens ?? usageOf(usage).cachedTokens ?? readTokens;
}

/** The counts of an answer's `usage`, of the OpenAI or the Messages API. */
export function usageOf(usage: unknown): {
  readonly promptTokens: number | undefined;
  readonly cachedTokens: number | undefined;
} {
  const {
    prompt_tokens,
    input_tokens,
    prompt_tokens_details,
    input_tokens_details,
    cache_read_input_tokens,
  } = (usage ?? {}) as Record<string, unknown>;
  const details = (prompt_tokens_details ?? input_tokens_details ?? {}) as {
    readonly cached_tokens?: unknown;
  };
  const count = (value: unknown) =>
    typeof value === "number" && Number.isFinite(value) && value >= 0 ? value : undefined;
  return {
    promptTokens: count(prompt_tokens) ?? count(input_tokens),
    cachedTokens: count(details.cached_tokens) ?? count(cache_read_input_tokens),
  };
}

function average(before: number | undefined, value: number): number {
  return before === undefined ? value : before + WEIGHT * (value - before);
}

/** A line through points, of which older ones count less. */
class LineFit {
  #x: number | undefined = undefined;
  #y = 0;
  #varianceX = 0;
  #covariance = 0;

  add(x: number, y: number): void {
    if (this.#x === undefined) {
      this.#x = x;
      this.#y = y;
      return;
    }
    const [dx, dy] = [x - this.#x, y - this.#y];
    this.#x += WEIGHT * dx;
    this.#y += WEIGHT * dy;
    this.#varianceX = (1 - WEIGHT) * (this.#varianceX + WEIGHT * dx * dx);
    this.#covariance = (1 - WEIGHT) * (this.#covariance + WEIGHT * dx * dy);
  }

  /**
   * Undefined without points. Where they hardly differ in x, the line is taken to begin at 0, and
   * it never begins below.
   */
  get slope(): number | undefined {
    if (this.#x === undefined) return undefined;
    const fromZero = this.#y / this.#x;
    const differ = Math.sqrt(this.#varianceX) > 0.1 * this.#x;
    return differ ? Math.min(fromZero, Math.max(0, this.#covariance / this.#varianceX)) : fromZero;
  }

  at(x: number): number | undefined {
    const { slope } = this;
    return slope === undefined || this.#x === undefined
      ? undefined
      : this.#y + slope * (x - this.#x);
  }
}
