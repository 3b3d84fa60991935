import type { IncomingHttpHeaders } from "node:http";
import type { Instance, InstancePool, Visit } from "@kv/fleet";
import { Deadline, legHeaders, type RequestBody } from "@kv/fleet/front-end";
import { KvError, type KvTransferParams } from "@kv/interface";
import { prefillBody, releaseBody } from "../request/leg-bodies.js";
import type { KvUse, PrefilledKv } from "../response/leg-answer.js";
import { badStatus } from "../upstream/upstream-errors.js";
import type { Part } from "./client-request.js";
import { type Legs, tryInstances } from "./legs.js";

/**
 * Has the blocks freed that a prefill worker holds for the part, and that no decode leg has taken,
 * in the background: else they are held until their lease ends. The prefill worker has no call for
 * it, so a decode instance that fits it gets a request that it refuses (see `releaseBody`). That is
 * harmless a second time.
 */
export function releaseUntaken(legs: Legs, part: Part, prefill: PrefilledKv, use: KvUse): void {
  const { requestId, headers, request, attempts } = part;
  const { decoders: pool, ambient } = legs;
  const { kvTransferParams, instance: partner } = prefill;
  part.record.released = true;
  const { model } = request.fields;
  // It is no client's request, and takes no turn of the routing.
  const [preferredDecode] = [attempts.failedDecode, NONE].flatMap((without) =>
    pool.alternatives(1, without, [partner]),
  );
  const release = { pool, partner, kvTransferParams, requestId, headers, model, preferredDecode };
  const served = use.isUnseen && freesOnlyWhatItWrites(legs, prefill) ? part : undefined;
  legs.inBackground(
    sendRelease(legs, { ...release, served }).then((outcome) =>
      ambient.metrics.count("kv_proxy_released_total", 1, { outcome }),
    ),
  );
}

const NONE: ReadonlySet<Instance> = new Set();

/**
 * Whether the prefill worker is one of vLLM's in push, and still holds the blocks. Such a worker
 * learns of no refusal (vLLM 0.33), and frees blocks that it has written: a decode instance serves
 * the request once more, with one token. Where the blocks are gone, a decode worker of vLLM would
 * wait for them, and never free its own.
 */
function freesOnlyWhatItWrites(
  { ambient, settings }: Legs,
  { fields, atMs }: PrefilledKv,
): boolean {
  const { transfer_mode: mode, kv_peer: peer } = fields.kv_transfer_params as KvTransferParams;
  return mode === "push" && peer == null && ambient.clock.now() < atMs + settings.timeouts.leaseMs;
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
  /** The instance of a pool of decode instances to ask first. */
  readonly preferredDecode?: Instance | undefined;
  /**
   * The part of the blocks, which an instance serves with one token before one refuses a request.
   */
  readonly served?: Part | undefined;
}

/** A request that has blocks freed. */
interface ReleaseRequest {
  readonly requestId: string;
  readonly path: string;
  readonly body: RequestBody;
  /** Whether it frees the blocks also when it is refused with 400. */
  readonly refusalFrees: boolean;
}

/**
 * `sent`: an instance has served the request, and read a token. `refused`: it was refused, as it
 * should.
 */
export type ReleaseOutcome = "sent" | "refused" | "failed";

/** Has blocks freed by an instance of `pool` that fits their holder. Never rejects. */
export async function sendRelease(legs: Legs, release: Release): Promise<ReleaseOutcome> {
  const { kvTransferParams, requestId, model, served } = release;
  if (served !== undefined) {
    // The workers match by the id of both legs, which a route makes in its own way.
    const body = prefillBody(served.request, kvTransferParams, requestId);
    const path = served.request.endpoint;
    const outcome = await send(legs, release, { requestId, path, body, refusalFrees: false });
    if (outcome !== "failed") return outcome;
  }
  const body = releaseBody(model, kvTransferParams);
  const refused = {
    requestId: `${requestId}-release`,
    path: "/v1/completions",
    body,
    refusalFrees: true,
  };
  return send(legs, release, refused);
}

async function send(
  { fleet, settings, ambient, forwarded }: Legs,
  { pool, partner, requestId: ofRequest, headers, preferredDecode }: Release,
  { requestId, path, body, refusalFrees }: ReleaseRequest,
): Promise<ReleaseOutcome> {
  const { clock, log } = ambient;
  const { role } = pool;
  const deadline = new Deadline({ clock, requestMs: settings.timeouts.releaseMs });

  async function leg(visit: Visit): Promise<ReleaseOutcome> {
    const { url } = visit.instance;
    const answer = await fleet.upstream.send({
      role,
      url,
      method: "POST",
      path,
      headers: legHeaders({
        clientHeaders: headers,
        forwarded: forwarded[role],
        requestId,
        instance: visit.instance,
      }),
      body,
      abort: deadline,
    });
    const { status } = answer;
    await answer.body.readLimited(64 * 1024);
    answer.discard();
    visit.succeeded();
    // vLLM refuses the request with 400 and then tells the holder. Any other status besides 2xx
    // comes from a gateway in front of the server.
    const served = status >= 200 && status < 300;
    if (!served && !(refusalFrees && status === 400)) throw badStatus(role, url, status);
    const outcome = served ? "sent" : "refused";
    log.info("release-sent", { requestId: ofRequest, instance: url, status, outcome });
    return outcome;
  }

  try {
    // A second refused one is harmless, so a failed one is tried on another instance.
    const retries = refusalFrees ? 1 : 0;
    const context = { requestId, preferredDecode };
    return await tryInstances({ pool, context, partner, deadline, retries, log }, leg);
  } catch (thrown) {
    const error = KvError.from(thrown, "KV_INTERNAL", "the blocks could not be freed");
    log.warn("blocks-not-released", { requestId: ofRequest, error });
    return "failed";
  } finally {
    deadline.close();
  }
}
