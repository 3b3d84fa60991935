import type { InstancePool, Visit } from "@kv/fleet";
import { type Ambient, KvError } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import { legHeaders } from "../http/headers.js";
import { Deadline } from "../request/deadline.js";
import { releaseBody } from "../request/leg-bodies.js";
import type { Upstream } from "../upstream/upstream.js";
import { badStatus } from "../upstream/upstream-errors.js";
import { tryInstances } from "./attempts.js";
import type { Part } from "./client-request.js";

interface Context {
  readonly decoders: InstancePool;
  readonly settings: ProxySettings;
  readonly ambient: Ambient;
}

/**
 * Has a decode instance tell the prefill worker to free the blocks that `kvTransferParams` (JSON text) names. Never rejects: where it fails,
 * the blocks are held until their lease ends.
 */
export async function releaseBlocks(
  { decoders: pool, settings, ambient }: Context,
  upstream: Upstream,
  part: Part,
  kvTransferParams: string,
): Promise<void> {
  const { clock, log, metrics } = ambient;
  const requestId = `${part.requestId}-release`;
  part.record.released = true;
  const deadline = new Deadline({ clock, requestMs: settings.timeouts.releaseMs });

  async function leg(visit: Visit): Promise<void> {
    const { url } = visit.instance;
    const { status, body, discard } = await upstream.send({
      role: "decode",
      url,
      method: "POST",
      path: "/v1/completions",
      headers: legHeaders(part.headers, requestId, visit.instance),
      body: releaseBody(part.request.fields.model, kvTransferParams),
      abort: deadline,
    });
    await body.readLimited(64 * 1024);
    discard();
    visit.succeeded();
    // A server refuses the request (400) or serves it (200). Any other status comes from a gateway in front of the server.
    if (status !== 400 && status !== 200) throw badStatus("decode", url, status);
    metrics.count("kv_proxy_released_total", 1, { outcome: "sent" });
    log.info("blocks-released", { requestId: part.requestId, instance: url, status });
  }

  try {
    // A second release is harmless, so a failed one is tried on another instance.
    await tryInstances({ pool, context: { requestId }, deadline, retries: 1, log }, leg);
  } catch (thrown) {
    const error = KvError.from(thrown, "KV_INTERNAL", "the blocks could not be freed");
    metrics.count("kv_proxy_released_total", 1, { outcome: "failed" });
    log.warn("blocks-not-released", { requestId: part.requestId, error });
  } finally {
    deadline.close();
  }
}
