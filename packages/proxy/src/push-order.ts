import { KvError } from "@kv/interface";
import { refuseNobody } from "./attempts.js";
import { runDecodeLeg } from "./decode-leg.js";
import type { Instance, Visit } from "./instance.js";
import type { InstancePool } from "./instances.js";
import { decodeBody, prefillBody } from "./leg-bodies.js";
import type { LegAnswer, LegOrder, LegOrderOptions, Part } from "./leg-order.js";
import { type PrefillOutcome, runPrefillLeg } from "./prefill-leg.js";
import { promptFieldsOf } from "./prompt-fields.js";
import { createPullOrder, failureWorthAnother, noKv, passedOn } from "./pull-order.js";
import {
  type CoordinatesBook,
  coordinatesParams,
  createCoordinatesBook,
  type KvCoordinates,
} from "./push-coordinates.js";
import { type FailedAttempt, failedAttempt, type RetryPolicy } from "./retry.js";
import type { Role } from "./upstream.js";

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

/** Nothing has left for the client: the part begins again, one leg after the other, under an id that no engine has met. */
interface Restart {
  readonly why: string;
  /** Whose failure it was, so that another is asked; nobody's where the prefill engine was restarted. */
  readonly failed?: Instance | undefined;
  /** Its one more try is this one. */
  readonly spent?: Role | undefined;
}

/**
 * The prefill worker writes the KV into the decode worker (vLLM's NixlPushConnector). At once: both legs leave together, the decode leg
 * with the prefill engine's coordinates; while those of the chosen instance are not known the legs go one after the other, and the
 * answer teaches them.
 */
export function createPushOrder(options: PushOrderOptions): LegOrder {
  const { prefillers, decoders, retry } = options;
  const { log, metrics } = options.ambient;
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
  const oneMore = {
    prefill: createPullOrder({ ...teaching, askForKv: ASK_FOR_PUSH, retry: spentAt("prefill", retry) }),
    decode: createPullOrder({ ...teaching, askForKv: ASK_FOR_PUSH, retry: spentAt("decode", retry) }),
  };

  async function atOnce(given: Part, visit: Visit, coordinates: KvCoordinates): Promise<LegAnswer | Restart> {
    const { instance } = visit;
    const failedDecode = new Set<Instance>();
    const part: Part = { ...given, avoidDecode: failedDecode };
    const prefillDeadline = part.deadline.fork();
    const decodeDeadline = part.deadline.fork();
    let learnt: KvCoordinates | undefined;
    const prefillOptions: LegOrderOptions = {
      ...options,
      prefillers: only(prefillers, visit),
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

    const giveUpPrefill = async () => {
      prefillDeadline.abort(new KvError("KV_REQUEST_ABORTED", "the decode leg failed"));
      await prefilling;
    };
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
      await giveUpPrefill();
      if (part.deadline.ended || !retry.afresh(failedAttempt("decode", first.error, 1))) throw first.error;
      return { why: "the decode leg broke off", failed: [...failedDecode].at(-1), spent: "decode" };
    }
    if ("answer" in first) {
      const { visit: decoded, status, discard } = first.answer;
      const failure = failureWorthAnother(decoders, decoded.instance, status);
      if (failure !== undefined && retry.afresh(failedAttempt("decode", failure, 1))) {
        discard();
        decoded.failed(failure);
        await giveUpPrefill();
        if (part.deadline.ended) throw part.deadline.reason;
        return { why: "the decode leg failed", failed: decoded.instance, spent: "decode" };
      }
    }
    const ended = "answer" in first ? await prefilling : first;
    const stale = learnt !== undefined && learnt.engineId !== coordinates.engineId;
    if (stale || ended.outcome === undefined) {
      const why = stale ? `engine ${coordinates.engineId} was restarted` : "the prefill leg failed";
      await giveUpDecode(why);
      if (part.deadline.ended) throw part.deadline.reason;
      if (stale) return { why };
      const attempt = failedAttempt("prefill", ended.error, 1);
      if (!retry.again(attempt)) throw ended.error;
      return { why, failed: instance, spent: attempt.stage === "connect" ? undefined : "prefill" };
    }
    if (ended.outcome.kind === "kv") {
      const answer = "answer" in first ? first.answer : await decoding;
      const asked = promptFieldsOf(part.request) !== "none" && answer.status === 200;
      return asked ? { ...answer, promptAnswer: ended.outcome.answer } : answer;
    }
    await giveUpDecode("the prefill worker keeps no KV for it");
    if (ended.outcome.kind === "error") {
      const failure = failureWorthAnother(prefillers, instance, ended.outcome.answer.status);
      const again = failure !== undefined && retry.again(failedAttempt("prefill", failure, 1));
      if (again && !part.deadline.ended)
        return { why: "the prefill leg failed", failed: instance, spent: "prefill" };
      return passedOn(ended.outcome);
    }
    throw noKv(ended.outcome.instance);
  }

  function beginAgain(given: Part, { why, failed, spent }: Restart): Promise<LegAnswer> {
    const { trail } = given;
    log.warn("push-began-again", {
      requestId: given.requestId,
      prefill: trail.prefill,
      decode: trail.decode,
      why,
    });
    metrics.count("kv_proxy_restarts_total");
    trail.restarts = (trail.restarts ?? 0) + 1;
    delete trail.decodeStartedAtMs;
    const avoid = new Set(failed === undefined ? [] : [failed]);
    const order = spent === undefined ? oneByOne : oneMore[spent];
    return order.run({
      ...given,
      requestId: `${given.requestId}-${options.newId()}`,
      ...(failed?.role === "prefill" ? { avoidPrefill: avoid } : { avoidDecode: avoid }),
    });
  }

  return {
    name: options.legs === "at-once" ? "push" : "push, prefill first",
    async run(given) {
      // The two engines find each other by this id: one that a client uses twice would find another prompt's KV.
      const part: Part = { ...given, requestId: `${given.requestId}-${options.newId()}` };
      if (options.legs === "at-once") {
        refuseNobody(decoders);
        const instance = prefillers.choose(part, new Set());
        const coordinates = instance === undefined ? undefined : book.of(instance);
        if (instance !== undefined && coordinates !== undefined) {
          const answer = await atOnce(part, instance.begin(), coordinates);
          return "why" in answer ? await beginAgain(given, answer) : answer;
        }
        // Its answer is to teach where it is: another instance in its place would leave that unknown.
        if (instance !== undefined) return oneByOne.run({ ...part, preferredPrefill: instance });
      }
      return oneByOne.run(part);
    },
    async settled() {
      const orders = [oneByOne, oneMore.prefill, oneMore.decode];
      await Promise.all([...behind, ...orders.map((order) => order.settled?.())]);
    },
  };
}

/** The policy for a part that has failed once at `role` already. */
function spentAt(role: Role, retry: RetryPolicy): RetryPolicy {
  const counted = (failed: FailedAttempt) =>
    failed.role === role ? { ...failed, attempt: failed.attempt + 1 } : failed;
  return {
    again: (failed) => retry.again(counted(failed)),
    afresh: (failed) => retry.afresh(counted(failed)),
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
