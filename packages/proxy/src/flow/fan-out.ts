import type { Instance } from "@kv/fleet";
import type { Deadline } from "@kv/fleet/front-end";
import { KvError } from "@kv/interface";
import type { ClientRequest, Part } from "../legs/client-request.js";
import { newAttempts } from "../legs/legs.js";
import type { RequestPart } from "../request/leg-bodies.js";
import type { AnsweredPart } from "../response/answered-parts.js";
import { RequestRecord } from "../telemetry/request-record.js";
import type { DisaggregationStrategy } from "./disaggregation-strategy.js";

/**
 * Runs all parts of a request at once and waits until each has the begin of an answer, so that an
 * error of one part can still be the answer of the request. The first answer that is not a 200 is
 * then the only one, and the other parts are aborted; so they are when a part fails. Further copies
 * of a prompt wait for the first copy's prefill leg, which leaves the prompt in the instance's
 * prefix cache.
 * @throws The first part's that fails.
 */
export function runParts(
  client: ClientRequest,
  strategy: DisaggregationStrategy,
  parts: readonly RequestPart[],
): Promise<readonly AnsweredPart[]> {
  return new FanOut(client, strategy).run(parts);
}

/** The prefill leg of a prompt's first copy. */
interface FirstPrefill {
  readonly ended: Promise<void>;
  instance: Instance | undefined;
}

/** What ended the fan-out before all parts had an answer. */
type EarlyEnd = { readonly error: unknown } | { readonly refusal: AnsweredPart };

class FanOut {
  readonly #client: ClientRequest;
  readonly #strategy: DisaggregationStrategy;
  readonly #deadlines: Deadline[] = [];
  /** By index of the prompt. */
  readonly #firstPrefills = new Map<number, FirstPrefill>();
  #earlyEnd: EarlyEnd | undefined = undefined;

  constructor(client: ClientRequest, strategy: DisaggregationStrategy) {
    this.#client = client;
    this.#strategy = strategy;
  }

  async run(parts: readonly RequestPart[]): Promise<readonly AnsweredPart[]> {
    const { record } = this.#client;
    const records = parts.map((_, index) => (index === 0 ? record : new RequestRecord()));
    const results = await Promise.allSettled(
      parts.map((part, index) => this.#runPart(part, index, records[index] ?? record)),
    );
    record.prefillWorkMs = records.reduce((sum, { prefillWorkMs }) => sum + prefillWorkMs, 0);
    const answered = results.flatMap((result) =>
      result.status === "fulfilled" ? [result.value] : [],
    );
    const end = this.#earlyEnd;
    if (end === undefined) return answered;
    const refusal = "refusal" in end ? end.refusal : undefined;
    for (const part of answered) {
      if (part === refusal) continue;
      part.answer.discard();
      part.answer.visit.abandoned();
    }
    for (const deadline of this.#deadlines) if (deadline !== refusal?.deadline) deadline.close();
    if ("refusal" in end) return [end.refusal];
    throw end.error;
  }

  /** `record`: of the first part, that of the request, whose log shows its legs. */
  async #runPart(
    requestPart: RequestPart,
    index: number,
    record: RequestRecord,
  ): Promise<AnsweredPart> {
    const { requestId, headers, prefillers } = this.#client;
    const deadline = this.#client.deadline.fork();
    this.#deadlines.push(deadline);
    const part: Part = {
      requestId: `${requestId}-${index}`,
      request: requestPart.request,
      headers,
      deadline,
      attempts: newAttempts(this.#client.attempts.failedPrefill),
      prefillers,
      record,
      isSplit: true,
    };
    try {
      const answer =
        requestPart.copy === 0
          ? await this.#runFirstCopy(part, requestPart.prompt)
          : await this.#runFurtherCopy(part, requestPart.prompt);
      const answered = { ...requestPart, requestId: part.requestId, deadline, answer };
      if (answer.status !== 200) this.#endEarly({ refusal: answered }, deadline);
      return answered;
    } catch (error) {
      this.#endEarly({ error: this.#client.deadline.reasonOr(error) }, deadline);
      throw error;
    }
  }

  async #runFirstCopy(part: Part, prompt: number) {
    let ended = () => {};
    const first: FirstPrefill = {
      ended: new Promise((resolve) => {
        ended = resolve;
      }),
      instance: undefined,
    };
    this.#firstPrefills.set(prompt, first);
    const onPrefilled = (instance: Instance) => {
      first.instance = instance;
      ended();
    };
    return this.#strategy.run({ ...part, onPrefilled }).finally(ended);
  }

  async #runFurtherCopy(part: Part, prompt: number) {
    const first = this.#firstPrefills.get(prompt);
    await first?.ended;
    if (part.deadline.aborted) throw part.deadline.reason;
    return this.#strategy.run({ ...part, preferredPrefill: first?.instance });
  }

  /** Aborts all parts except that of `deadline`; only the first call counts. */
  #endEarly(end: EarlyEnd, deadline: Deadline): void {
    if (this.#earlyEnd !== undefined) return;
    this.#earlyEnd = end;
    const reason = new KvError("KV_REQUEST_ABORTED", "another part of the request failed");
    for (const other of this.#deadlines) if (other !== deadline) other.abort(reason);
  }
}
