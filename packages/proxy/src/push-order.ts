import { KvError } from "@kv/interface";
import { runDecodeLeg } from "./decode-leg.js";
import type { Instance, Visit } from "./instance.js";
import type { InstancePool } from "./instances.js";
import { decodeBody, prefillBody } from "./leg-bodies.js";
import type { LegAnswer, LegOrder, LegOrderOptions, Part } from "./leg-order.js";
import { type PrefillOutcome, runPrefillLeg } from "./prefill-leg.js";
import { promptFieldsOf } from "./prompt-fields.js";
import { createPullOrder, noKv, passedOn } from "./pull-order.js";
import {
  type CoordinatesBook,
  coordinatesParams,
  createCoordinatesBook,
  type KvCoordinates,
} from "./push-coordinates.js";
import { failureStage } from "./upstream.js";

export interface PushOrderOptions extends LegOrderOptions {
  /** Both legs at once (upstream today), or one after the other (vLLM's first push proxy). */
  readonly legs: "at-once" | "prefill-first";
  readonly newId: () => string;
  /** Where the prefill engines are; one of its own by default. */
  readonly book?: CoordinatesBook;
}

const ASK_FOR_PUSH =
  '{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,' +
  '"remote_host":null,"remote_port":null,"transfer_mode":"push"}';

/** The prefill leg failed where both were under way; the decode leg's end is of no interest. */
interface PrefillEnded {
  readonly outcome?: PrefillOutcome;
  readonly error?: unknown;
}

/**
 * The prefill worker writes the KV into the decode worker (vLLM's NixlPushConnector). At once: both legs leave together, the decode leg
 * with the prefill engine's coordinates; while those of the chosen instance are not known the legs go one after the other, and the
 * answer teaches them.
 */
export function createPushOrder(options: PushOrderOptions): LegOrder {
  const { log } = options.ambient;
  const { book = createCoordinatesBook() } = options;
  const behind = new Set<Promise<void>>();
  const teaching: LegOrderOptions = {
    ...options,
    onKv(instance, params) {
      book.learn(instance, params);
      options.onKv?.(instance, params);
    },
  };
  const oneByOne = createPullOrder({ ...teaching, askForKv: ASK_FOR_PUSH });

  async function atOnce(part: Part, visit: Visit, coordinates: KvCoordinates): Promise<LegAnswer | "again"> {
    const { instance } = visit;
    const prefillDeadline = part.deadline.fork();
    const decodeDeadline = part.deadline.fork();
    let learnt: KvCoordinates | undefined;
    const prefillOptions: LegOrderOptions = {
      ...options,
      prefillers: only(options.prefillers, visit),
      onKv: (from, params) => {
        learnt = book.learn(from, params);
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
    decoding.catch(() => {});
    const failed = prefilling.then((ended) => (ended.outcome?.kind === "kv" ? NEVER : ended));

    const giveUpDecode = async (why: string) => {
      decodeDeadline.abort(new KvError("KV_REQUEST_ABORTED", why));
      await decoding.then(
        (answer) => {
          answer.discard();
          answer.visit.abandoned();
        },
        () => {},
      );
    };
    const first = await Promise.race([decoding.then((answer) => ({ answer })), failed]).catch(
      (error: unknown) => ({ error, decode: true }) as const,
    );
    if ("answer" in first && first.answer.status === 200 && promptFieldsOf(part.request) === "none") {
      // Its word is not needed any more; it ends by itself, or with the client.
      const ending = prefilling.then(() => void behind.delete(ending));
      behind.add(ending);
      return first.answer;
    }
    if ("decode" in first) {
      prefillDeadline.abort(new KvError("KV_REQUEST_ABORTED", "the decode leg failed"));
      await prefilling;
      throw first.error;
    }
    const ended = "answer" in first ? await prefilling : first;
    const stale = learnt !== undefined && learnt.engineId !== coordinates.engineId;
    if (stale || ended.outcome === undefined) {
      const why = stale ? `engine ${coordinates.engineId} was restarted` : "the prefill leg failed";
      await giveUpDecode(why);
      const brokeOff = ended.error !== undefined && failureStage(ended.error) !== undefined;
      // Nothing has left for the client: once more, one leg after the other, where another instance may be chosen.
      if (!part.deadline.ended && (stale || brokeOff)) {
        log.warn("push-began-again", { requestId: part.requestId, prefill: instance.url, why });
        return "again";
      }
      throw ended.error ?? part.deadline.reason;
    }
    if (ended.outcome.kind === "kv") {
      const answer = "answer" in first ? first.answer : await decoding;
      const asked = promptFieldsOf(part.request) !== "none" && answer.status === 200;
      return asked ? { ...answer, promptAnswer: ended.outcome.answer } : answer;
    }
    await giveUpDecode("the prefill worker keeps no KV for it");
    if (ended.outcome.kind === "error") return passedOn(ended.outcome);
    throw noKv(ended.outcome.instance);
  }

  return {
    name: options.legs === "at-once" ? "push" : "push, prefill first",
    async run(given) {
      // The two engines find each other by this id: one that a client uses twice would find another prompt's KV.
      const part: Part = { ...given, requestId: `${given.requestId}-${options.newId()}` };
      if (options.legs === "at-once") {
        const instance = options.prefillers.choose(part, new Set());
        const coordinates = instance === undefined ? undefined : book.of(instance);
        if (instance !== undefined && coordinates !== undefined) {
          const answer = await atOnce(part, instance.begin(), coordinates);
          if (answer !== "again") return answer;
          return oneByOne.run({ ...given, requestId: `${given.requestId}-${options.newId()}` });
        }
        // Its answer is to teach where it is: another instance in its place would leave that unknown.
        if (instance !== undefined) return oneByOne.run({ ...part, preferredPrefill: instance });
      }
      return oneByOne.run(part);
    },
    async settled() {
      await Promise.all([...behind, oneByOne.settled?.()]);
    },
  };
}

const NEVER = new Promise<never>(() => {});

/** A pool that has this visit and no other: the decode worker was told of this instance. */
function only(pool: InstancePool, visit: Visit): InstancePool {
  return {
    ...pool,
    visit: (_context, excluding: ReadonlySet<Instance>) =>
      excluding.has(visit.instance) ? undefined : visit,
  };
}
