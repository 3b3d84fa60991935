import { KvError } from "@kv/interface";
import { onSomeInstance } from "./attempts.js";
import { badStatus } from "./bad-answer.js";
import { hold } from "./bounded-body.js";
import { createDeadline } from "./deadline.js";
import { legHeaders } from "./headers.js";
import type { Visit } from "./instance.js";
import { releaseBody } from "./leg-bodies.js";
import type { LegOrderOptions, Part } from "./leg-order.js";
import type { RetryPolicy } from "./retry.js";

/** A second word to the prefill worker is harmless, so any failure may be tried elsewhere; but one that answered is no reason to ask all. */
const retry: RetryPolicy = {
  again: ({ stage, attempt }) => stage === "connect" || attempt === 1,
  afresh: () => false,
};

/** The refusal that the request is made for, and the answer of a server that serves it. Any other did not come from behind the gateway. */
const TOLD = [400, 200];

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
  part.trail.released = true;
  const deadline = createDeadline({ clock, requestMs: timeouts.releaseMs });

  async function leg(visit: Visit): Promise<void> {
    const { url } = visit.instance;
    const { status, body, discard } = await upstream.send({
      role: "decode",
      url,
      method: "POST",
      path: "/v1/completions",
      headers: legHeaders(part.headers, requestId, visit.instance),
      body: releaseBody(part.request.fields.model, kvTransferParams),
      ending: deadline,
    });
    await hold(body, 64 * 1024);
    discard();
    visit.succeeded();
    if (!TOLD.includes(status)) throw badStatus("decode", url, status);
    metrics.count("kv_proxy_released_total", 1, { outcome: "sent" });
    log.info("blocks-released", { requestId: part.requestId, instance: url, status });
  }

  try {
    await onSomeInstance({ pool: decoders, retry, log }, { requestId, deadline }, leg);
  } catch (thrown) {
    const error = KvError.from(thrown, "KV_INTERNAL", "the blocks could not be freed");
    metrics.count("kv_proxy_released_total", 1, { outcome: "failed" });
    log.warn("blocks-not-released", { requestId: part.requestId, error });
  } finally {
    deadline.close();
  }
}
