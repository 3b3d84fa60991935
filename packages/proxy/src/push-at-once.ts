import type { Instance, Visit } from "./instance.js";
import type { LegAnswer, LegOrderOptions, Part } from "./leg-order.js";
import { promptFieldsOf } from "./prompt-fields.js";
import { failureWorthAnother, noKv, passedOn } from "./pull-order.js";
import type { CoordinatesBook, KvCoordinates } from "./push-coordinates.js";
import { type PrefillEnded, type PushRace, startPushRace } from "./push-race.js";
import { failedAttempt } from "./retry.js";
import type { Role } from "./upstream.js";

/** Nothing has left for the client: the part begins again, one leg after the other, under an id that no engine has met. */
export interface Restart {
  readonly why: string;
  /** Whose failure it was, so that another is asked; nobody's where the prefill engine was restarted. */
  readonly failed?: Instance | undefined;
  /** Its one more try is this one. */
  readonly spent?: Role | undefined;
}

export interface PushAtOnce {
  /** Both legs leave together. Errors: those of the legs, and the deadline's reason. */
  run(part: Part, visit: Visit, coordinates: KvCoordinates): Promise<LegAnswer | Restart>;
  /** Resolves when no prefill leg goes on behind a request that has its answer. */
  settled(): Promise<void>;
}

/** Both legs at once, and what each way they end means for the client. */
export function createPushAtOnce(options: LegOrderOptions & { readonly book: CoordinatesBook }): PushAtOnce {
  const { prefillers, decoders, policy, retry } = options;
  const behind = new Set<Promise<void>>();

  async function afterDecodeFailure(
    part: Part,
    race: PushRace,
    error: unknown,
    failed: Instance | undefined,
  ): Promise<Restart> {
    await race.giveUpPrefill();
    if (part.deadline.ended || !retry.afresh(failedAttempt("decode", error, 1))) throw error;
    return { why: "the decode leg broke off", failed, spent: "decode" };
  }

  async function afterServerFailure(
    part: Part,
    race: PushRace,
    answer: LegAnswer,
  ): Promise<Restart | undefined> {
    const { visit, status, discard } = answer;
    const failure = failureWorthAnother(decoders, visit.instance, status);
    if (failure === undefined || !retry.afresh(failedAttempt("decode", failure, 1))) return undefined;
    discard();
    visit.failed(failure);
    await race.giveUpPrefill();
    if (part.deadline.ended) throw part.deadline.reason;
    return { why: "the decode leg failed", failed: visit.instance, spent: "decode" };
  }

  async function afterPrefill(
    part: Part,
    race: PushRace,
    { outcome, error }: PrefillEnded,
    instance: Instance,
  ): Promise<LegAnswer | Restart> {
    if (race.stale()) {
      const why = "the prefill engine was restarted";
      await race.giveUpDecode(why);
      if (part.deadline.ended) throw part.deadline.reason;
      return { why };
    }
    switch (outcome?.kind) {
      case undefined: {
        const why = "the prefill leg failed";
        await race.giveUpDecode(why);
        if (part.deadline.ended) throw part.deadline.reason;
        const attempt = failedAttempt("prefill", error, 1);
        if (!retry.again(attempt)) throw error;
        return { why, failed: instance, spent: attempt.stage === "connect" ? undefined : "prefill" };
      }
      case "kv": {
        const answer = await race.decoding;
        const asked = promptFieldsOf(part.request) !== "none" && answer.status === 200;
        return asked ? { ...answer, promptAnswer: outcome.answer } : answer;
      }
      case "error": {
        await race.giveUpDecode("the prefill worker keeps no KV for it");
        const failure = failureWorthAnother(prefillers, instance, outcome.answer.status);
        const again = failure !== undefined && retry.again(failedAttempt("prefill", failure, 1));
        if (again && !part.deadline.ended)
          return { why: "the prefill leg failed", failed: instance, spent: "prefill" };
        return passedOn(outcome);
      }
      case "no-kv":
        await race.giveUpDecode("the prefill worker keeps no KV for it");
        if (policy.missingKv === "fail") throw noKv(outcome.instance);
        return { why: `${outcome.instance} answered without kv_transfer_params` };
    }
  }

  return {
    async run(given, visit, coordinates) {
      const failedDecode = new Set<Instance>();
      const part: Part = { ...given, avoidDecode: failedDecode };
      const race = startPushRace(options, part, visit, coordinates);
      const first = await race.first;
      switch (first.kind) {
        case "decode failed":
          return afterDecodeFailure(part, race, first.error, [...failedDecode].at(-1));
        case "decoded": {
          if (first.answer.status === 200 && promptFieldsOf(part.request) === "none") {
            // The prefill leg's word is not needed any more; it ends by itself, or with the client.
            const ending = race.prefilling.then(() => void behind.delete(ending));
            behind.add(ending);
            return first.answer;
          }
          const restart = await afterServerFailure(part, race, first.answer);
          return restart ?? afterPrefill(part, race, await race.prefilling, visit.instance);
        }
        case "prefill failed":
          return afterPrefill(part, race, first.prefill, visit.instance);
      }
    },
    async settled() {
      await Promise.all(behind);
    },
  };
}
