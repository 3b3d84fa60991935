import { KvError } from "@kv/interface";
import { hold } from "./bounded-body.js";
import { createDeadline } from "./deadline.js";
import { legHeaders } from "./headers.js";
import { releaseBody } from "./leg-bodies.js";
import type { LegOrderOptions, Part } from "./leg-order.js";

/**
 * Frees the blocks of a prefill worker for which no decode leg will come, so that they are not held until their lease ends. There is
 * no call for that at the prefill side; a decode worker that refuses a request tells it (see `releaseBody`). Never rejects: where it
 * fails the lease ends by itself.
 */
export async function releaseBlocks(
  { ambient, decoders, upstream, timeouts }: LegOrderOptions,
  part: Part,
  kvTransferParams: string,
): Promise<void> {
  const { clock, log, metrics } = ambient;
  const requestId = `${part.requestId}-release`;
  const visit = decoders.visit({ requestId }, new Set());
  part.trail.released = true;
  if (visit === undefined) return;
  const deadline = createDeadline({ clock, requestMs: timeouts.releaseMs });
  const { url } = visit.instance;
  try {
    const answer = await upstream.send({
      role: "decode",
      url,
      method: "POST",
      path: "/v1/completions",
      headers: legHeaders(part.headers, requestId, visit.instance),
      body: releaseBody(part.request.fields.model, kvTransferParams),
      ending: deadline,
    });
    await hold(answer.body, 64 * 1024);
    answer.discard();
    visit.succeeded();
    metrics.count("kv_proxy_released_total", 1, { outcome: "sent" });
    log.info("blocks-released", { requestId: part.requestId, instance: url, status: answer.status });
  } catch (thrown) {
    const error = KvError.from(thrown, "KV_INTERNAL", "the blocks could not be freed");
    if (deadline.ended) visit.abandoned();
    else visit.failed(error);
    metrics.count("kv_proxy_released_total", 1, { outcome: "failed" });
    log.warn("blocks-not-released", { requestId: part.requestId, instance: url, error });
  } finally {
    deadline.close();
  }
}
