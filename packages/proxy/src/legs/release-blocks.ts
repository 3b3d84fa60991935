import type { IncomingHttpHeaders } from "node:http";
import { failureStage, type Instance, type InstancePool } from "@kv/fleet";
import { Deadline, type RequestBody } from "@kv/fleet/front-end";
import { KvError, type KvTransferParams } from "@kv/interface";
import { prefillBody, releaseBody } from "../request/leg-bodies.js";
import type { PrefilledKv } from "../response/leg-answer.js";
import { badStatus, noInstance } from "../upstream/upstream-errors.js";
import type { Part } from "./client-request.js";
import type { Legs } from "./legs.js";
import type { HeldBlocks } from "./tries.js";

/**
 * Frees in the background blocks that P holds and no decode leg took; else P holds them until the
 * lease ends. P has no call for it, so a D that fits P gets a request that it refuses
 * (`releaseBody`). A second release is harmless.
 */
export function releaseUntaken(
  legs: Legs,
  part: Part,
  prefill: PrefilledKv,
  held: HeldBlocks,
): void {
  const { requestId, headers, request, attempts } = part;
  const { decoders: pool, ambient } = legs;
  const { kvTransferParams, instance: partner } = prefill;
  part.record.released = true;
  const { model } = request.fields;
  // No client's request, so it takes no turn of the routing.
  const [preferredDecode] = [attempts.decode.avoided, NONE].flatMap((without) =>
    pool.alternatives(1, without, [partner]),
  );
  const release = { pool, partner, kvTransferParams, requestId, headers, model, preferredDecode };
  const served = held.isUnseen && freesOnlyWhatItWrites(legs, prefill) ? part : undefined;
  legs.inBackground(
    sendRelease(legs, { ...release, served }).then((outcome) =>
      ambient.metrics.count("kv_proxy_released_total", 1, { outcome }),
    ),
  );
}

const NONE: ReadonlySet<Instance> = new Set();

/**
 * Whether P is a vLLM in push that still holds the blocks. It learns of no refusal (vLLM 0.33) but
 * frees blocks that it has written, so a D must serve one token. If P's blocks were gone, vLLM's D
 * would wait for them and never free its own.
 */
function freesOnlyWhatItWrites(
  { ambient, settings }: Legs,
  { fields, atMs }: PrefilledKv,
): boolean {
  const { transfer_mode: mode, kv_peer: peer } = fields.kv_transfer_params as KvTransferParams;
  return mode === "push" && peer == null && ambient.clock.now() < atMs + settings.timeouts.leaseMs;
}

export interface Release {
  /** Instances of the holder's other role. */
  readonly pool: InstancePool;
  readonly partner: Instance;
  /** Names the blocks (JSON text) for an instance of `pool` that reads them. */
  readonly kvTransferParams: string;
  readonly requestId: string;
  readonly headers: IncomingHttpHeaders;
  readonly model: unknown;
  readonly preferredDecode?: Instance | undefined;
  /** The blocks' part, which one instance serves with one token before a refusal is tried. */
  readonly served?: Part | undefined;
}

/** `sent`: the request was served and read a token. `refused`: it was refused, as intended. */
export type ReleaseOutcome = "sent" | "refused" | "failed";

export async function sendRelease(legs: Legs, release: Release): Promise<ReleaseOutcome> {
  const { kvTransferParams, requestId, model, served } = release;
  if (served !== undefined) {
    // Workers match the legs by id, and each route makes ids its own way.
    const body = prefillBody(served.request, kvTransferParams, requestId);
    const outcome = await send(legs, release, requestId, served.request.endpoint, body, false);
    if (outcome !== "failed") return outcome;
  }
  const body = releaseBody(model, kvTransferParams);
  return send(legs, release, `${requestId}-release`, "/v1/completions", body, true);
}

/**
 * `refusalFrees`: a 400 also frees the blocks, so a second try is harmless. No outcome counts as a
 * failure.
 */
async function send(
  legs: Legs,
  { pool, partner, requestId: ofRequest, headers, preferredDecode }: Release,
  requestId: string,
  path: string,
  body: RequestBody,
  refusalFrees: boolean,
): Promise<ReleaseOutcome> {
  const { settings, ambient } = legs;
  const { clock, log } = ambient;
  const deadline = new Deadline({ clock, requestMs: settings.timeouts.releaseMs });
  const tried = new Set<Instance>();
  let answers = refusalFrees ? 2 : 1;
  let last: unknown;
  while (answers > 0 && !deadline.aborted) {
    const visit = pool.visit({ requestId, preferredDecode }, tried, partner);
    if (visit === undefined) break;
    const { instance } = visit;
    tried.add(instance);
    try {
      const leg = { path, body, fresh: true };
      const answer = await legs.send({ requestId, headers, deadline }, instance, leg);
      const { status } = answer;
      await answer.body.readLimited(64 * 1024);
      answer.discard();
      // vLLM answers 400 and then tells the holder. Statuses other than 400 and 2xx come from a
      // gateway.
      const served = status >= 200 && status < 300;
      if (!served && !(refusalFrees && status === 400)) throw badStatus(instance, status);
      const outcome = served ? "sent" : "refused";
      log.info("release-sent", { requestId: ofRequest, instance: instance.url, status, outcome });
      deadline.close();
      return outcome;
    } catch (error) {
      last = deadline.reasonOr(error);
      if (failureStage(error) !== "connect") answers -= 1;
    } finally {
      visit.abandoned();
    }
  }
  deadline.close();
  const error = KvError.from(last ?? noInstance(pool, partner), "KV_INTERNAL", "no release");
  log.warn("blocks-not-released", { requestId: ofRequest, error });
  return "failed";
}
