import { type Ambient, KvError, settleAll } from "@kv/interface";
import { instanceName } from "../instances/instance.js";
import type { PooledInstance } from "../instances/pooled-instance.js";
import { Deadline } from "../request/deadline.js";
import { legHeaders, type Upstream } from "../upstream/upstream.js";
import type { AskedPrompt } from "./asked-prompts.js";
import type { KvSources } from "./kv-sources.js";

export interface WarmStartOptions extends Ambient {
  readonly sources: KvSources;
  readonly upstream: Upstream;
  /** Whether health checks tell that an instance runs. */
  readonly hasChecks: boolean;
}

/** The longest that a new instance takes no load. */
const WARM_MS = 10_000;
const AT_ONCE = 4;
const LOOK_AGAIN_MS = 100;
const ANSWER_BYTES = 64 * 1024;

/** Has a new prefill instance fetch the prompts that are asked for most, before it takes load. */
export class WarmStart {
  readonly #closing: Deadline;

  constructor(private readonly options: WarmStartOptions) {
    this.#closing = new Deadline(options);
  }

  /** The instance takes load when this resolves, and from the start where no other one does. */
  async warm(instance: PooledInstance): Promise<void> {
    const { sources, clock, log } = this.options;
    const prompts = sources.asked.mostAsked();
    if (prompts.length === 0) return;
    instance.warm(true);
    await this.#whenItRuns(instance);
    const deadline = new Deadline({ clock, requestMs: WARM_MS, parent: this.#closing });
    const beganMs = clock.now();
    const waiting = prompts[Symbol.iterator]();
    let tokens = 0;
    try {
      const fetchAll = async () => {
        for (const prompt of waiting) tokens += await this.#fetch(instance, prompt, deadline);
      };
      await settleAll(Array.from({ length: AT_ONCE }, fetchAll));
    } catch (error) {
      log.warn("instance-not-warm", { instance: instanceName(instance), error });
    } finally {
      instance.warm(false);
      deadline.close();
      const ms = Math.round(clock.now() - beganMs);
      log.info("instance-warm", { instance: instanceName(instance), tokens, ms });
    }
  }

  close(): void {
    this.#closing.abort(new KvError("KV_REQUEST_ABORTED", "the front end ends"));
  }

  async #whenItRuns(instance: PooledInstance): Promise<void> {
    const { clock, hasChecks } = this.options;
    const isUnseen = () =>
      instance.seenAtMs === Number.NEGATIVE_INFINITY &&
      !instance.draining &&
      !this.#closing.aborted;
    while (hasChecks && isUnseen())
      await new Promise<void>((resolve) => {
        clock.setTimer(resolve, LOOK_AGAIN_MS);
      });
  }

  /** Returns how many tokens of the prompt's start the instance has fetched. */
  async #fetch(
    instance: PooledInstance,
    { model, tokens }: AskedPrompt,
    deadline: Deadline,
  ): Promise<number> {
    const { sources, upstream, random } = this.options;
    const requestId = `warm-${random.uuid()}`;
    const context = { requestId, request: { fields: {}, tokenIds: tokens } };
    const holders = await sources.holders(context);
    // Nobody waits for it, so it may be slower than computing.
    const source = holders.find((each) => each.instance !== instance);
    if (source === undefined) return 0;
    const kvSource = sources.kvTransferParam(source);
    const prompt = `[${tokens.slice(0, source.tokens).join()}]`;
    const body = `{"model":${JSON.stringify(model) ?? null},"prompt":${prompt},"max_tokens":1,"kv_transfer_params":{"remote_kv_source":${kvSource}}}`;
    const answer = await upstream.send({
      role: instance.role,
      url: instance.url,
      method: "POST",
      path: "/v1/completions",
      headers: legHeaders({ clientHeaders: {}, forwarded: new Set(), requestId, instance }),
      body,
      abort: deadline,
    });
    await answer.body.readLimited(ANSWER_BYTES);
    answer.discard();
    return answer.status === 200 ? source.tokens : 0;
  }
}
