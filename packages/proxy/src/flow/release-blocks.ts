import type { Instance, Visit } from "@kv/fleet";
import { Deadline, legHeaders } from "@kv/fleet/front-end";
import { KvError } from "@kv/interface";
import { releaseBody } from "../request/leg-bodies.js";
import { badStatus } from "../upstream/upstream-errors.js";
import type { Part } from "./client-request.js";
import { type Legs, tryInstances } from "./legs.js";

/**
 * Has the blocks of the prefill worker `partner` freed that no decode leg will read and that `kvTransferParams` (JSON text) names, in the background: else they
 * are held until their lease ends. The prefill worker has no call for it, so a decode instance that fits it gets a request that it refuses (see `releaseBody`).
 */
export function releaseBlocks(legs: Legs, part: Part, kvTransferParams: string, partner: Instance): void {
  legs.inBackground(release(legs, part, kvTransferParams, partner));
}

/** Never rejects. */
async function release(
  { decoders: pool, fleet, settings, ambient, forwarded }: Legs,
  part: Part,
  kvTransferParams: string,
  partner: Instance,
): Promise<void> {
  const { clock, log, metrics } = ambient;
  const requestId = `${part.requestId}-release`;
  part.record.released = true;
  const deadline = new Deadline({ clock, requestMs: settings.timeouts.releaseMs });

  async function leg(visit: Visit): Promise<void> {
    const { url } = visit.instance;
    const { status, body, discard } = await fleet.upstream.send({
      role: "decode",
      url,
      method: "POST",
      path: "/v1/completions",
      headers: legHeaders({
        clientHeaders: part.headers,
        forwarded,
        requestId,
        instance: visit.instance,
      }),
      body: releaseBody(part.request.fields.model, kvTransferParams),
      abort: deadline,
    });
    await body.readLimited(64 * 1024);
    discard();
    visit.succeeded();
    // vLLM refuses the request with 400 and then tells P. Any other status besides 2xx comes from a gateway in front of the server.
    const served = status >= 200 && status < 300;
    if (status !== 400 && !served) throw badStatus("decode", url, status);
    const outcome = served ? "sent" : "refused";
    metrics.count("kv_proxy_released_total", 1, { outcome });
    log.info("release-sent", { requestId: part.requestId, instance: url, status, outcome });
  }

  try {
    // A second release is harmless, so a failed one is tried on another instance.
    await tryInstances({ pool, context: { requestId }, partner, deadline, retries: 1, log }, leg);
  } catch (thrown) {
    const error = KvError.from(thrown, "KV_INTERNAL", "the blocks could not be freed");
    metrics.count("kv_proxy_released_total", 1, { outcome: "failed" });
    log.warn("blocks-not-released", { requestId: part.requestId, error });
  } finally {
    deadline.close();
  }
}
