import { KvError } from "@kv/interface";
import { runDecodeLeg } from "./decode-leg.js";
import type { Instance, Visit } from "./instance.js";
import type { InstancePool } from "./instances.js";
import { decodeBody, prefillBody } from "./leg-bodies.js";
import type { LegAnswer, LegOrderOptions, Part } from "./leg-order.js";
import { type PrefillOutcome, runPrefillLeg } from "./prefill-leg.js";
import {
  ASK_FOR_PUSH,
  type CoordinatesBook,
  coordinatesParams,
  type KvCoordinates,
} from "./push-coordinates.js";

/** How the prefill leg ended: what it brought, or the error. */
export interface PrefillEnded {
  readonly outcome?: PrefillOutcome;
  readonly error?: unknown;
}

/** What came first; a prefill leg that brought KV only lets the race go on. */
export type FirstEnd =
  | { readonly kind: "decoded"; readonly answer: LegAnswer }
  | { readonly kind: "decode failed"; readonly error: unknown }
  | { readonly kind: "prefill failed"; readonly prefill: PrefillEnded };

/** Both legs of a part under way at once. */
export interface PushRace {
  readonly first: Promise<FirstEnd>;
  readonly prefilling: Promise<PrefillEnded>;
  readonly decoding: Promise<LegAnswer>;
  /** The prefill engine answered under another engine id than the decode engine was told. */
  stale(): boolean;
  /** Resolves when that leg has ended. */
  giveUpPrefill(): Promise<void>;
  giveUpDecode(why: string): Promise<void>;
}

/** The prefill leg goes to the instance of `visit`, whose `coordinates` the decode leg carries. */
export function startPushRace(
  options: LegOrderOptions & { readonly book: CoordinatesBook },
  part: Part,
  visit: Visit,
  coordinates: KvCoordinates,
): PushRace {
  const prefillDeadline = part.deadline.fork();
  const decodeDeadline = part.deadline.fork();
  let learnt: KvCoordinates | undefined;
  const prefillOptions: LegOrderOptions = {
    ...options,
    prefillers: only(options.prefillers, visit),
    onKv: (from, params) => {
      learnt = options.book.learn(from, params);
      options.onKv?.(from, params);
    },
  };
  const prefilling = runPrefillLeg(
    prefillOptions,
    { ...part, deadline: prefillDeadline },
    prefillBody(part.request, ASK_FOR_PUSH),
  ).then(
    (outcome): PrefillEnded => ({ outcome }),
    (error: unknown): PrefillEnded => ({ error }),
  );
  const decoding = runDecodeLeg(
    options,
    { ...part, deadline: decodeDeadline },
    decodeBody(part.request, coordinatesParams(coordinates, part.requestId)),
  );
  const decoded = decoding.then(
    (answer): FirstEnd => ({ kind: "decoded", answer }),
    (error: unknown): FirstEnd => ({ kind: "decode failed", error }),
  );
  const failed = prefilling.then((prefill): FirstEnd | Promise<never> =>
    // One of its own: what waits for a promise that outlives the race is kept with it, answer and all.
    prefill.outcome?.kind === "kv" ? new Promise(() => {}) : { kind: "prefill failed", prefill },
  );
  return {
    first: Promise.race([decoded, failed]),
    prefilling,
    decoding,
    stale: () => learnt !== undefined && learnt.engineId !== coordinates.engineId,
    async giveUpPrefill() {
      prefillDeadline.abort(new KvError("KV_REQUEST_ABORTED", "the decode leg failed"));
      await prefilling;
    },
    async giveUpDecode(why) {
      decodeDeadline.abort(new KvError("KV_REQUEST_ABORTED", why));
      const end = await decoded;
      if (end.kind !== "decoded") return;
      end.answer.discard();
      end.answer.visit.abandoned();
    },
  };
}

/** A pool that has this visit and no other: the decode worker was told of this instance. */
function only(pool: InstancePool, visit: Visit): InstancePool {
  return {
    ...pool,
    visit: (_context, excluding: ReadonlySet<Instance>) =>
      excluding.has(visit.instance) ? undefined : visit,
  };
}
