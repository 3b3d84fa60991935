import type { Instance } from "@kv/fleet";
import {
  cannotDisaggregate,
  type Deadline,
  type Endpoint,
  parseRequestInSteps,
} from "@kv/fleet/front-end";
import type { ReceivedBody } from "@kv/http";
import { KvError } from "@kv/interface";
import type { ClientRequest, Part } from "../legs/client-request.js";
import type { Legs } from "../legs/legs.js";
import { Attempts } from "../legs/tries.js";
import type { ObjectStore } from "../readback/object-store.js";
import { type RequestPart, splitRequest } from "../request/leg-bodies.js";
import { AnswerFilter } from "../response/answer-filter.js";
import { type LegAnswer, streamResponse } from "../response/leg-answer.js";
import { type AnsweredPart, mergeAnswers } from "../response/merge-answers.js";
import type { NamedPrefillers } from "../sidecar/named-prefillers.js";
import { RequestRecord } from "../telemetry/request-record.js";
import { ConditionalStrategy } from "./conditional-strategy.js";
import { ReadbackStrategy } from "./readback-strategy.js";
import { type DisaggregationStrategy, PrefillEngines, TwoLegs } from "./two-legs.js";

/** Runs the legs of each part and merges the answers. */
export class Generation {
  readonly #strategy: DisaggregationStrategy;
  readonly #readback: ReadbackStrategy | undefined;

  /**
   * `named`: reads a sidecar's prefill instances from request headers. The settings `mode`,
   * `pushLegs`, `readback` and `disaggregateAbove` name the strategy.
   */
  constructor(
    private readonly legs: Legs,
    objects: ObjectStore | undefined,
    private readonly named: NamedPrefillers | undefined,
  ) {
    const { settings, fleet } = legs;
    const engines = new PrefillEngines(fleet.pairing);
    const plain = new TwoLegs(legs, engines);
    const { readback, disaggregateAbove: above } = settings;
    if (readback !== undefined && objects !== undefined)
      this.#readback = new ReadbackStrategy(legs, plain, engines, readback, objects);
    const twoLegs = this.#readback ?? plain;
    // The request tells a sidecar whether it has two legs.
    this.#strategy =
      above === undefined || named !== undefined
        ? twoLegs
        : new ConditionalStrategy(legs, twoLegs, above, this.#readback);
  }

  async close(): Promise<void> {
    await this.#readback?.close();
  }

  /** The strategy, as status pages show it. */
  get flow(): string {
    const { name } = this.#strategy;
    return this.named === undefined ? name : `sidecar, ${name}`;
  }

  /**
   * Returns a failure that an instance reported in an answer already sent. The caller writes errors
   * thrown before the answer's head.
   */
  async answer(
    client: ClientRequest,
    endpoint: Endpoint,
    body: ReceivedBody,
  ): Promise<KvError | undefined> {
    const { fleet, settings, prefillers, decoders } = this.legs;
    const { requestId, headers, deadline, record, attempts } = client;
    const named = this.named?.of(headers, requestId);
    const request = await parseRequestInSteps(endpoint, body.take(), fleet.parses);
    const { socket } = client.response.req;
    request.kvSource = this.named?.kvSource(headers, requestId, named, socket);
    attempts.avoid(this.legs.missing?.lacking(request.fields.model));
    const part: Part = {
      requestId,
      headers,
      deadline,
      record,
      attempts,
      request,
      prefillers: named,
      preferredDecode: undefined,
    };
    const { kvSources } = fleet;
    if (prefillers.readsTokenIds() || decoders.readsTokenIds() || kvSources?.readsTokenIds())
      await fleet.addTokenIds(request, headers);
    const { disaggregationLimit: limit } = request;
    if (limit !== undefined && named?.length !== 0 && settings.policy.unsplittable === "fail")
      throw cannotDisaggregate(limit);
    const single =
      named?.length === 0
        ? "unnamed"
        : limit !== undefined
          ? "unsplittable"
          : request.asksAboutPrompt
            ? "asks-about-prompt"
            : undefined;
    if (single !== undefined)
      return this.#stream(client, endpoint, await this.legs.single(part, single, limit));
    const split = splitRequest(request, settings.limits.parts);
    const begun = split.next();
    const parts = begun.done === true ? begun.value : await fleet.parses.run(split);
    if (parts.length > 1) return this.#runParts(client, part, parts);
    return this.#stream(client, endpoint, await this.#strategy.run(part));
  }

  async #runParts(
    client: ClientRequest,
    part: Part,
    parts: readonly RequestPart[],
  ): Promise<KvError | undefined> {
    // Long members are not copied.
    const lengthBytes = parts.reduce((sum, { request }) => sum + request.text.length, 0);
    client.grow(parts.length - 1, lengthBytes);
    client.record.parts = parts.length;
    const fanOut = new FanOut(part, this.#strategy);
    try {
      const answered = await fanOut.run(parts);
      const refusal = answered.find(({ answer }) => answer.status !== 200);
      if (refusal !== undefined)
        return await this.#stream(client, part.request.endpoint, refusal.answer);
      return await mergeAnswers(this.legs, client, answered);
    } finally {
      fanOut.end();
    }
  }

  #stream(
    client: ClientRequest,
    endpoint: Endpoint,
    answer: LegAnswer,
  ): Promise<KvError | undefined> {
    const filter = new AnswerFilter(endpoint, answer);
    return streamResponse(client, answer, this.legs.settings, filter);
  }
}

interface FirstPrefill {
  readonly ended: Promise<void>;
  instance: Instance | undefined;
}

interface EarlyEnd {
  readonly error?: unknown;
  readonly refusal?: AnsweredPart;
}

/**
 * Runs all parts and waits until each answer begins, so that one part's error can still answer the
 * request. The first failure, or the first answer other than 200, aborts the other parts. Further
 * copies of a prompt wait for the first copy's prefill leg, which fills the prefix cache.
 */
class FanOut {
  readonly #deadlines: Deadline[] = [];
  readonly #answered: AnsweredPart[] = [];
  /** The key is the index of the prompt. */
  readonly #firstPrefills = new Map<number, FirstPrefill>();
  /** The first failure, or the first answer other than 200. */
  #early: EarlyEnd | undefined;

  constructor(
    private readonly client: Part,
    private readonly strategy: DisaggregationStrategy,
  ) {}

  /**
   * Returns all answers, or one that is not 200.
   * @throws The error of the first part that fails.
   */
  async run(parts: readonly RequestPart[]): Promise<readonly AnsweredPart[]> {
    const { record } = this.client;
    const records = parts.map((_, index) => (index === 0 ? record : new RequestRecord()));
    const answered = await Promise.all(
      parts.map((part, index) => this.#runPart(part, index, records[index] ?? record)),
    );
    record.prefillWorkMs = records.reduce((sum, { prefillWorkMs }) => sum + prefillWorkMs, 0);
    if (this.#early === undefined) return answered.filter((part) => part !== undefined);
    if (this.#early.refusal === undefined) throw this.#early.error;
    return [this.#early.refusal];
  }

  end(): void {
    for (const { answer } of this.#answered) {
      answer.discard();
      answer.visit.abandoned();
    }
    for (const deadline of this.#deadlines) deadline.close();
  }

  /** `record`: the request's, given to the first part only; the log shows its legs. */
  async #runPart(
    requestPart: RequestPart,
    index: number,
    record: RequestRecord,
  ): Promise<AnsweredPart | undefined> {
    const { requestId, headers, prefillers } = this.client;
    const deadline = this.client.deadline.fork();
    this.#deadlines.push(deadline);
    const attempts = new Attempts();
    attempts.avoid(this.client.attempts.prefill.avoided);
    const part: Part = {
      requestId: `${requestId}-${index}`,
      request: requestPart.request,
      headers,
      deadline,
      attempts,
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
      this.#answered.push(answered);
      if (answer.status !== 200) this.#endEarly(deadline, { refusal: answered });
      return answered;
    } catch (error) {
      this.#endEarly(deadline, { error: this.client.deadline.reasonOr(error) });
      return undefined;
    } finally {
      attempts.end();
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
    return this.strategy.run({ ...part, onPrefilled }).finally(ended);
  }

  async #runFurtherCopy(part: Part, prompt: number) {
    const first = this.#firstPrefills.get(prompt);
    await first?.ended;
    part.deadline.throwIfAborted();
    return this.strategy.run({ ...part, preferredPrefill: first?.instance });
  }

  /** Aborts all other parts than that of `deadline`. Only the first call counts. */
  #endEarly(deadline: Deadline, early: EarlyEnd): void {
    if (this.#early !== undefined) return;
    this.#early = early;
    const reason = new KvError("KV_REQUEST_ABORTED", "another part of the request failed");
    for (const other of this.#deadlines) if (other !== deadline) other.abort(reason);
  }
}
