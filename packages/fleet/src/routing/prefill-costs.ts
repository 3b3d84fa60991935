import {
  bodyLength,
  type GenerationRequest,
  promptIds,
  writtenIds,
} from "../request/generation-request.js";
import type { InstancePool } from "./instance-pool.js";

/** A prefill leg that ended with a computed prompt. */
export interface EndedPrefill {
  readonly request: GenerationRequest;
  readonly usage: unknown;
  readonly cachedTokens?: number | undefined;
  /** The prefix to read from a decode instance. */
  readonly readTokens?: number | undefined;
  /** The prefix to fetch from a KV source, beyond what the instance has. */
  readonly fetchTokens?: number | undefined;
  readonly durationMs: number;
  /** No other leg was there when it began. */
  readonly wasAlone: boolean;
}

const WEIGHT = 0.1;
/** A source that seemed slow is tried again after some legs: the first fetch has a handshake. */
const [FETCH_WEIGHT, FETCH_FADES] = [0.5, 0.95];

/** Costs of prompts at prefill instances: moving averages of ended legs. */
export class PrefillCosts {
  #charactersPerToken = 4;
  #msPerLeg: number | undefined;
  readonly #fit = new LineFit();
  #readMsPerToken: number | undefined;
  #fetchMsPerToken: number | undefined;

  /** 4 before the first measurement. */
  get charactersPerToken(): number {
    return this.#charactersPerToken;
  }

  /** Cost of an uncached token; undefined before the first measurement. */
  get msPerToken(): number | undefined {
    return this.#fit.slope;
  }

  /** Time of a leg that does not wait; undefined before the first measurement. */
  legMs(computedTokens: number): number | undefined {
    return this.#fit.at(computedTokens);
  }

  /** Reads `readTokens` from a decode instance and computes the rest. */
  readingMs(promptTokens: number, readTokens: number): number | undefined {
    const { msPerToken } = this;
    if (msPerToken === undefined) return undefined;
    return (
      msPerToken * Math.max(0, promptTokens - readTokens) + (this.#readMsPerToken ?? 0) * readTokens
    );
  }

  /** Time to fetch tokens from a KV source; undefined before the first measurement. */
  fetchMs(tokens: number): number | undefined {
    return this.#fetchMsPerToken === undefined ? undefined : this.#fetchMsPerToken * tokens;
  }

  /** Exact for token ids, else estimated; undefined without text. */
  promptTokens(request: GenerationRequest): number | undefined {
    const ids = promptIds(request);
    if (ids !== undefined) return ids.length;
    if (request.fields.prompt_embeds != null) return undefined;
    return Math.ceil(bodyLength(request) / this.#charactersPerToken);
  }

  waitMs(prefillers: InstancePool): number | undefined {
    const least = prefillers.fewestInFlight();
    return least === undefined ? undefined : this.queueMs(least);
  }

  /** Time until an instance with so many legs begins another one. */
  queueMs(inFlight: number): number | undefined {
    return this.#msPerLeg === undefined ? undefined : inFlight * this.#msPerLeg;
  }

  ended(leg: EndedPrefill): void {
    const { request, usage, durationMs, wasAlone, readTokens, fetchTokens } = leg;
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
    const moved = readTokens ?? fetchTokens;
    if (moved === undefined) {
      if (this.#fetchMsPerToken !== undefined) this.#fetchMsPerToken *= FETCH_FADES;
      this.#fit.add(computed, durationMs);
      return;
    }
    const computeMs = this.legMs(computed);
    const arrived = Math.min(moved, cachedTokens);
    if (computeMs === undefined || arrived === 0) return;
    const msPerToken = Math.max(0, durationMs - computeMs) / arrived;
    if (readTokens !== undefined) this.#readMsPerToken = average(this.#readMsPerToken, msPerToken);
    else this.#fetchMsPerToken = average(this.#fetchMsPerToken, msPerToken, FETCH_WEIGHT);
  }
}

/** Undefined if unknown. */
export function uncomputedTokens({
  usage,
  cachedTokens,
  readTokens,
}: EndedPrefill): number | undefined {
  return cachedTokens ?? usageOf(usage).cachedTokens ?? readTokens;
}

/** Of the OpenAI or the Messages API. */
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

function average(before: number | undefined, value: number, weight = WEIGHT): number {
  return before === undefined ? value : before + weight * (value - before);
}

class LineFit {
  #x: number | undefined;
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

  /** Undefined without points. The line begins at 0 if they hardly differ in x, and never below. */
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
