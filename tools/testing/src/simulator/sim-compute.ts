import type { ConnectorRequest, KvError, KvTransferParams } from "@kv/interface";
import type { SimEngineOptions } from "./sim-options.js";
import type { SimSides } from "./sim-sides.js";

/** Number of steps from the step that admits a prompt to the end of its computation. */
export const PREFILL_STEPS = 2;

/**
 * Tokens of a request whose KV is computed: those of the prompt, and of D's output all but the
 * last.
 */
export function tokensHeld({
  numTokens,
  kind,
  outputTokens = 1,
}: Pick<Running, "numTokens" | "kind" | "outputTokens">) {
  return kind === "decode" ? numTokens + outputTokens - 1 : numTokens;
}

export interface Running extends ConnectorRequest {
  readonly prompt: number;
  readonly numTokens: number;
  readonly kind: "prefill" | "decode";
  readonly outputTokens?: number;
  readonly sameTokensAs?: number;
  readonly cachedTokens: number;
  blockIds: number[];
  phase: "queued" | "computing" | "receiving" | "over";
  stepsLeft: number;
  receivingSinceMs: number;
  computedTokens: number;
  /** Prompt tokens whose KV was there, or came from a peer. */
  coveredTokens: number;
  /** Of these, the tokens that came from a peer. */
  externalTokens: number;
  /** The request's KV did not arrive, so this engine computes it. */
  recompute: boolean;
  resolve(params: KvTransferParams): void;
  reject(error: KvError): void;
}

/**
 * The model of a simulated engine. In each step it writes KV into a request's blocks, and it checks
 * the KV that must be there.
 */
export interface SimCompute {
  /**
   * Runs one step of a request, and returns whether the request ended in it. With `staged`, a
   * prompt is computed in two chunks.
   */
  step(request: Running): boolean;
  /** Reports a violation when the request's blocks hold bytes that are not the prompt's KV. */
  check(request: Running, received: boolean): void;
}

export function createSimCompute(options: SimEngineOptions, sides: SimSides): SimCompute {
  const { hostName, violation } = options;
  const { ranks, workers, staged } = sides;

  function step(request: Running): boolean {
    if (request.phase !== "computing") return false;
    const { prompt, numTokens, externalTokens, recompute } = request;
    const isReceived = externalTokens > 0 && !recompute;
    if (request.recompute && request.stepsLeft === PREFILL_STEPS) {
      ranks.compute(prompt, request.blockIds, 0, numTokens);
    }
    request.stepsLeft -= 1;
    if (request.kind === "prefill" && (request.stepsLeft === 0 || staged)) {
      request.computedTokens = request.stepsLeft === 0 ? numTokens : Math.floor(numTokens / 2);
      const from = isReceived ? request.coveredTokens : 0;
      ranks.compute(prompt, request.blockIds, from, request.computedTokens);
    }
    if (request.stepsLeft > 0) {
      if (options.reportsLayers === true && request.kind === "prefill") computeFirstLayer(request);
      return false;
    }
    if (request.kind === "decode")
      ranks.compute(prompt, request.blockIds, numTokens, tokensHeld(request));
    if (request.kind === "decode" || isReceived) check(request, false);
    return true;
  }

  function computeFirstLayer({ requestId, prompt, blockIds, numTokens }: Running): void {
    ranks.compute(prompt, blockIds, 0, numTokens, 1);
    const layer = { regions: ["layers.0"], computedTokens: { [requestId]: numTokens } };
    // Those of the first stage have it.
    for (const worker of workers.slice(0, options.tpSize)) worker.layerComputed?.(layer);
  }

  function check(request: Running, received: boolean): void {
    const numTokens = received ? request.coveredTokens : tokensHeld(request);
    const wrong = ranks.firstWrong(request.prompt, request.blockIds, numTokens, received);
    if (wrong !== undefined)
      violation(`${hostName}: request ${request.requestId} has wrong bytes: ${wrong}`);
  }

  return { step, check };
}
