import type { IncomingHttpHeaders } from "node:http";
import type { Instance, InstancePool, Visit } from "@kv/fleet";
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
  const { requestId, headers, request } = part;
  const { metrics } = legs.ambient;
  part.record.released = true;
  const { model } = request.fields;
  const release = { pool: legs.decoders, partner, kvTransferParams, requestId, headers, model };
  legs.inBackground(
    sendRelease(legs, release).then((outcome) => metrics.count("kv_proxy_released_total", 1, { outcome })),
  );
}

/** Blocks to free. */
export interface Release {
  /** The instances that can have them freed: those of the other role. */
  readonly pool: InstancePool;
  /** The instance that holds them. */
  readonly partner: Instance;
  /** Names them (JSON text), as for an instance of `pool` that reads them. */
  readonly kvTransferParams: string;
  readonly requestId: string;
  /** A client's headers. */
  readonly headers: IncomingHttpHeaders;
  readonly model: unknown;
}

/** `sent`: an instance has served the request, and read a token. `refused`: it was refused, as it should. */
export type ReleaseOutcome = "sent" | "refused" | "failed";

/** Has blocks freed by an instance of `pool` that fits their holder. Never rejects. */
export async function sendRelease(
  { fleet, settings, ambient, forwarded }: Legs,
  { pool, partner, kvTransferParams, requestId: ofRequest, headers, model }: Release,
): Promise<ReleaseOutcome> {
  const { clock, log } = ambient;
  const { role } = pool;
  const requestId = `${ofRequest}-release`;
  const deadline = new Deadline({ clock, requestMs: settings.timeouts.releaseMs });

  async function leg(visit: Visit): Promise<ReleaseOutcome> {
    const { url } = visit.instance;
    const { status, body, discard } = await fleet.upstream.send({
      role,
      url,
      method: "POST",
      path: "/v1/completions",
      headers: legHeaders({
        clientHeaders: headers,
        forwarded: forwarded[role],
        requestId,
        instance: visit.instance,
      }),
      body: releaseBody(model, kvTransferParams),
      abort: deadline,
    });
    await body.readLimited(64 * 1024);
    discard();
    visit.succeeded();
    // vLLM refuses the request with 400 and then tells the holder. Any other status besides 2xx comes from a gateway in front of the server.
    const served = status >= 200 && status < 300;
    if (status !== 400 && !served) throw badStatus(role, url, status);
    const outcome = served ? "sent" : "refused";
    log.info("release-sent", { requestId: ofRequest, instance: url, status, outcome });
    return outcome;
  }

  try {
    // A second release is harmless, so a failed one is tried on another instance.
    return await tryInstances({ pool, context: { requestId }, partner, deadline, retries: 1, log }, leg);
  } catch (thrown) {
    const error = KvError.from(thrown, "KV_INTERNAL", "the blocks could not be freed");
    log.warn("blocks-not-released", { requestId: ofRequest, error });
    return "failed";
  } finally {
    deadline.close();
  }
}
