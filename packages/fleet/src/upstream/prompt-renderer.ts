import { hash } from "node:crypto";
import type { IncomingHttpHeaders } from "node:http";
import { type Ambient, KvError } from "@kv/interface";
import type { Instance } from "../instances/instance.js";
import { Deadline } from "../request/deadline.js";
import { bodyOf, type GenerationRequest, writtenIds } from "../request/generation-request.js";
import type { InstancePool } from "../routing/instance-pool.js";
import { legHeaders, type Upstream } from "./upstream.js";

/** Options of `PromptRenderer`. */
export interface PromptRendererOptions {
  /** Have the tokenizer and chat template. Prefill instances' servers stream nothing. */
  readonly renderers: InstancePool;
  readonly upstream: Upstream;
  readonly forwarded: ReadonlySet<string>;
  readonly ambient: Ambient;
}

type Outcome = "rendered" | "remembered" | "unsupported" | "failed";

/** Tokenizes the longest prompts. A request waits no longer for a better choice. */
const TIMEOUT_MS = 2000;
/** An instance may restart with a version that has the route. */
const ASK_AGAIN_MS = 60_000;
/** vLLM answers 403 without `--enable-scale-out`. */
const NOT_SERVED: ReadonlySet<number> = new Set([403, 404, 405, 501]);
const WARNING_INTERVAL_MS = 600_000;
const MAX_ANSWER_BYTES = 32 * 1024 * 1024;
/** Counts 4 per token, and the keys. */
const MAX_BYTES = 32_000_000;
const MAX_PROMPTS = 100_000;
/** Longer keys are hashed, which takes 3 % of a request's processor time. */
const MAX_KEY_LENGTH = 1024;
/** They do not change the prompt, so equal prompts have equal keys. */
const NOT_OF_THE_PROMPT = new Set(
  "stream stream_options max_tokens max_completion_tokens max_output_tokens min_tokens temperature top_p top_k min_p n best_of seed stop stop_token_ids ignore_eos logprobs top_logprobs prompt_logprobs presence_penalty frequency_penalty repetition_penalty logit_bias user session_id store metadata priority cache_salt request_id service_tier".split(
    " ",
  ),
);

/**
 * Token ids of prompts, from vLLM's route `/render` (0.32 and 0.33 with `--enable-scale-out`:
 * `POST /v1/chat/completions/render` and so for each endpoint; the server applies its chat
 * template). Results are remembered. A prompt that cannot be rendered goes on without token ids.
 */
export class PromptRenderer {
  readonly #known = new Map<string, Int32Array | Promise<Int32Array | undefined>>();
  #bytes = 0;
  readonly #without = new WeakMap<Instance, number>();
  #turn = 0;
  #warnedAtMs = Number.NEGATIVE_INFINITY;

  constructor(private readonly options: PromptRendererOptions) {}

  /** Undefined if unknown or written in the body. Never rejects. */
  async tokenIds(
    request: GenerationRequest,
    headers: IncomingHttpHeaders,
  ): Promise<Int32Array | undefined> {
    const { prompt, prompt_embeds: embeds } = request.fields;
    if (Array.isArray(prompt) || writtenIds(request) !== undefined || embeds != null)
      return undefined;
    const key = keyOf(request);
    const known = this.#known.get(key);
    if (known !== undefined) {
      this.#known.delete(key);
      this.#known.set(key, known);
      this.#count("remembered");
      return known;
    }
    const instance = this.#instance();
    if (instance === undefined) {
      this.#count("unsupported");
      return undefined;
    }
    const rendering = this.#render(instance, request, headers);
    this.#known.set(key, rendering);
    const ids = await rendering;
    this.#known.delete(key);
    if (ids !== undefined) this.#remember(key, ids);
    return ids;
  }

  #remember(key: string, ids: Int32Array): void {
    this.#known.set(key, ids);
    this.#bytes += ids.byteLength + key.length;
    for (const [oldest, value] of this.#known) {
      if (this.#bytes <= MAX_BYTES && this.#known.size <= MAX_PROMPTS) return;
      if (!(value instanceof Int32Array)) continue;
      this.#known.delete(oldest);
      this.#bytes -= value.byteLength + oldest.length;
    }
  }

  #instance(): Instance | undefined {
    const { renderers, ambient } = this.options;
    const nowMs = ambient.clock.now();
    const able = renderers
      .list()
      .filter((one) => one.available(nowMs) && nowMs >= (this.#without.get(one) ?? nowMs));
    this.#turn += 1;
    return able[this.#turn % able.length];
  }

  async #render(
    instance: Instance,
    request: GenerationRequest,
    clientHeaders: IncomingHttpHeaders,
  ): Promise<Int32Array | undefined> {
    const { upstream, forwarded, ambient } = this.options;
    const { clock, random } = ambient;
    const path = `${request.endpoint}/render`;
    const deadline = new Deadline({ clock, requestMs: TIMEOUT_MS });
    let outcome: Outcome = "failed";
    try {
      const answer = await upstream.send({
        role: instance.role,
        url: instance.url,
        method: "POST",
        path,
        body: bodyOf(request),
        abort: deadline,
        headers: legHeaders({ clientHeaders, forwarded, requestId: random.uuid(), instance }),
      });
      const { bytes, complete } = await answer.body.readLimited(MAX_ANSWER_BYTES);
      if (!complete) answer.discard();
      const { status } = answer;
      const ids = complete && status === 200 ? tokenIdsIn(bytes) : undefined;
      if (ids !== undefined) outcome = "rendered";
      else if (NOT_SERVED.has(status)) {
        outcome = "unsupported";
        this.#without.set(instance, clock.now() + ASK_AGAIN_MS);
        const hint = "vLLM has this route since 0.32, where it is started with --enable-scale-out";
        this.#warn(instance, `it answered ${status} to POST ${path}: ${hint}`);
      }
      // If the engine refuses the body, the leg's answer tells the client.
      else if (status !== 400)
        this.#warn(instance, `it answered ${status} to POST ${path}, without token ids`);
      return ids;
    } catch (error) {
      const cause = deadline.aborted
        ? `no answer within ${TIMEOUT_MS} ms`
        : KvError.from(error, "KV_INTERNAL", "failed").message;
      this.#warn(instance, `POST ${path}: ${cause}`);
      return undefined;
    } finally {
      deadline.close();
      this.#count(outcome);
    }
  }

  #count(outcome: Outcome): void {
    this.options.ambient.metrics.count("kv_proxy_rendered_total", 1, { outcome });
  }

  #warn({ url }: Instance, reason: string): void {
    const { clock, log } = this.options.ambient;
    if (clock.now() - this.#warnedAtMs < WARNING_INTERVAL_MS) return;
    this.#warnedAtMs = clock.now();
    log.warn("prompt-not-rendered", {
      instance: url,
      reason,
      hint: "requests are routed by the begin of their text instead of by token ids",
    });
  }
}

function keyOf({ endpoint, fields }: GenerationRequest): string {
  const parts: string[] = [endpoint];
  for (const name in fields)
    if (!NOT_OF_THE_PROMPT.has(name)) parts.push(name, keyPartOf(fields[name]));
  // V8 would keep a sum as a tree of parts, with three times the memory.
  return shortened(parts.join("\0"));
}

/** A long text is hashed as it is: as JSON it would be copied first. */
const keyPartOf = (value: unknown): string =>
  typeof value === "string" && value.length > MAX_KEY_LENGTH
    ? `"${shortened(value)}`
    : (JSON.stringify(value) ?? "");

const shortened = (text: string): string =>
  text.length <= MAX_KEY_LENGTH ? text : hash("sha256", text, "base64");

function tokenIdsIn(bytes: Buffer): Int32Array | undefined {
  let answer: unknown;
  try {
    answer = JSON.parse(bytes.toString());
  } catch {
    return undefined;
  }
  const rendered: unknown = Array.isArray(answer) && answer.length === 1 ? answer[0] : answer;
  const ids = (rendered as { readonly token_ids?: unknown } | null)?.token_ids;
  if (!Array.isArray(ids) || ids.length === 0) return undefined;
  return ids.every((id) => Number.isInteger(id) && id >= 0 && id < 2 ** 31)
    ? Int32Array.from(ids as number[])
    : undefined;
}
