import type { Instance, InstancePool, Visit } from "@kv/fleet";
import type { Upstream } from "@kv/fleet/front-end";
import { Deadline, legHeaders } from "@kv/fleet/front-end";
import { type Ambient, KvError } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import { releaseBody } from "../request/leg-bodies.js";
import { badStatus } from "../upstream/upstream-errors.js";
import { tryInstances } from "./attempts.js";
import type { Part } from "./client-request.js";

interface Context {
  readonly decoders: InstancePool;
  readonly settings: ProxySettings;
  readonly ambient: Ambient;
  readonly forwarded: ReadonlySet<string>;
}

/**
 * Has a decode instance that fits the prefill instance `partner` tell it to free the blocks that `kvTransferParams` (JSON text) names. Never rejects: where it fails,
 * the blocks are held until their lease ends.
 */
export async function releaseBlocks(
  { decoders: pool, settings, ambient, forwarded }: Context,
  upstream: Upstream,
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
    const { status, body, discard } = await upstream.send({
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
