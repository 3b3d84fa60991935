import { KvError } from "@kv/interface";
import { whyEnded } from "./deadline.js";
import type { Exchange } from "./exchange.js";
import type { GatheredPart } from "./gather.js";
import type { LegOrderOptions } from "./leg-order.js";
import { mergeJson } from "./merge-json.js";
import { mergeStreams } from "./merge-stream.js";

/** Makes one answer of the parts' and writes it. Ends the parts' visits. */
export async function mergeAnswers(
  options: LegOrderOptions,
  exchange: Exchange,
  parts: readonly GatheredPart[],
): Promise<void> {
  try {
    if (parts.every(({ answer }) => answer.eventStream)) await mergeStreams(options, exchange, parts);
    else await mergeJson(options, exchange, parts);
    for (const { answer } of parts) answer.visit.succeeded();
  } catch (thrown) {
    const error = KvError.from(
      whyEnded(exchange.deadline, thrown),
      "KV_INTERNAL",
      "the answers could not be merged",
    );
    const { instance } = error.details;
    for (const { answer } of parts) {
      answer.discard();
      if (answer.visit.instance.url === instance) answer.visit.failed(error);
      else answer.visit.abandoned();
    }
    throw error;
  }
}
