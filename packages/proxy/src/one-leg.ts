import { runDecodeLeg } from "./decode-leg.js";
import { aloneBody } from "./leg-bodies.js";
import type { LegAnswer, LegOrderOptions, Part } from "./leg-order.js";

/** A part, or a `whole` request, that a decode instance computes from its prompt on; told in log and metrics. */
export function runAlone(
  options: LegOrderOptions,
  part: Part,
  reason: string,
  { whole = false } = {},
): Promise<LegAnswer> {
  const { log, metrics } = options.ambient;
  log.warn("decode-computes", { requestId: part.requestId, reason });
  metrics.count("kv_proxy_decode_alone_total");
  return runDecodeLeg(options, part, aloneBody(part.request), { whole });
}

/** A part that concerns the prompt alone: a prefill instance's whole answer is the client's, streamed or not. */
export function runPromptOnly(options: LegOrderOptions, part: Part): Promise<LegAnswer> {
  return runDecodeLeg(options, part, aloneBody(part.request), { role: "prefill", whole: true });
}
