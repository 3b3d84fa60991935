import { hash } from "node:crypto";
import type { IncomingHttpHeaders } from "node:http";
import { type Ambient, KvError } from "@kv/interface";
import type { Instance } from "../instances/instance.js";
import { Deadline } from "../request/deadline.js";
import { bodyOf, type GenerationRequest, writtenIds } from "../request/generation-request.js";
import type { InstancePool } from "../routing/instance-pool.js";
import { legHeaders, type Upstream } from "./upstream.js";

/** What `PromptRenderer` gets from its user. */
export interface PromptRendererOptions {
  /**
   * Have the model's tokenizer and chat template. The HTTP servers of prefill instances stream
   * nothing.
   */
  readonly renderers: InstancePool;
  readonly upstream: Upstream;
  readonly forwarded: ReadonlySet<string>;
  readonly ambient: Ambient;
}

/**
 * Longer than a tokenizer takes for the longest prompts; a request waits no longer than this for a
 * better choice.
 */
const TIMEOUT_MS = 2000;
/**
 * An instance without the route is asked again, as it may have been restarted with another version.
 */
const ASK_AGAIN_MS = 60_000;
/** vLLM answers 403 to the route where it was started without `--enable-scale-out`. */
const NOT_SERVED: ReadonlySet<number> = new Set([403, 404, 405, 501]);
const WARNING_INTERVAL_MS = 600_000;
const MAX_ANSWER_BYTES = 32 * 1024 * 1024;
/** Bytes of all prompts that are remembered: 4 for each token, and their keys. */
const MAX_BYTES = 32_000_000;
const MAX_PROMPTS = 100_000;
/** Characters of a key. A longer one is hashed, which takes 3 % of a request's processor time. */
const MAX_KEY_LENGTH = 1024;
/** Members of a body that do not change its prompt. Without them, equal prompts have equal keys. */
const NOT_OF_THE_PROMPT = new Set(
  "stream stream_options max_tokens max_completion_tokens max_output_tokens min_tokens temperature top_p top_k min_p n best_of seed stop stop_token_ids ignore_eos logprobs top_logprobs prompt_logprobs presence_penalty frequency_penalty repetition_penalty logit_bias user session_id store metadata priority cache_salt request_id service_tier".split(
    " ",
  ),
);

/**
 * The token ids of prompts, from vLLM's route `/render` (0.32 and 0.33 with `--enable-scale-out`:
 * `POST /v1/chat/completions/render` and so for each endpoint; the server applies its chat
 * template). What was rendered once is remembered, and not asked for again while it is being
 * rendered. A prompt that cannot be rendered has no token ids, and its request goes on without.
 */
export class PromptRenderer {
  readonly #options: PromptRendererOptions;
  readonly #known = new Map<string, Int32Array | Promise<Int32Array | undefined>>();
  #bytes = 0;
  readonly #without = new WeakMap<Instance, number>();
  #turn = 0;
  #warnedAtMs = Number.NEGATIVE_INFINITY;

  constructor(options: PromptRendererOptions) {
    this.#options = options;
  }

  /**
   * The token ids of a request's prompt; undefined where they are not known, or the body has them
   * itself. Never rejects.
   */
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
    const { renderers, ambient } = this.#options;
    const nowMs = ambient.clock.now();
    const able = renderers
      .list()
      .filter(
        (instance) =>
          instance.available(nowMs) &&
          nowMs >= (this.#without.get(instance) ?? Number.NEGATIVE_INFINITY),
      );
    this.#turn += 1;
    return able[this.#turn % able.length];
  }

  async #render(
    instance: Instance,
    request: GenerationRequest,
    clientHeaders: IncomingHttpHeaders,
  ): Promise<Int32Array | undefined> {
    const { upstream, forwarded, ambient } = this.#options;
    const { clock, random } = ambient;
    const path = `${request.endpoint}/render`;
    const deadline = new Deadline({ clock, requestMs: TIMEOUT_MS });
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
      if (NOT_SERVED.has(status)) {
        this.#without.set(instance, clock.now() + ASK_AGAIN_MS);
        const hint = "vLLM has this route since 0.32, where it is started with --enable-scale-out";
        this.#warn(instance, `it answered ${status} to POST ${path}: ${hint}`);
        this.#count("unsupported");
        return undefined;
      }
      const ids = complete && status === 200 ? tokenIdsIn(bytes) : undefined;
      // A body that the engine refuses is refused again by its leg, whose answer is the client's.
      if (ids === undefined && status !== 400)
        this.#warn(instance, `it answered ${status} to POST ${path}, without token ids`);
      this.#count(ids === undefined ? "failed" : "rendered");
      return ids;
    } catch (error) {
      const cause = deadline.aborted
        ? `no answer within ${TIMEOUT_MS} ms`
        : KvError.from(error, "KV_INTERNAL", "failed").message;
      this.#warn(instance, `POST ${path}: ${cause}`);
      this.#count("failed");
      return undefined;
    } finally {
      deadline.close();
    }
  }

  #count(outcome: "rendered" | "remembered" | "unsupported" | "failed"): void {
    this.#options.ambient.metrics.count("kv_proxy_rendered_total", 1, { outcome });
  }

  #warn({ url }: Instance, reason: string): void {
    const { clock, log } = this.#options.ambient;
    if (clock.now() - this.#warnedAtMs < WARNING_INTERVAL_MS) return;
    this.#warnedAtMs = clock.now();
    log.warn("prompt-not-rendered", {
      instance: url,
      reason,
      hint: "requests are routed by the begin of their text instead of by token ids",
    });
  }
}

/** Equal for requests with the same prompt. */
function keyOf({ endpoint, fields }: GenerationRequest): string {
  const parts: string[] = [endpoint];
  for (const name in fields)
    if (!NOT_OF_THE_PROMPT.has(name)) parts.push(name, JSON.stringify(fields[name]) ?? "");
  // V8 would keep a sum as a tree of its parts, which takes three times the memory.
  const text = parts.join("\0");
  return text.length <= MAX_KEY_LENGTH ? text : hash("sha256", text, "base64");
}

/** `token_ids` of the answer: an object for chats, a list of one for a completion. */
function tokenIdsIn(bytes: Uint8Array): Int32Array | undefined {
  let answer: unknown;
  try {
    answer = JSON.parse(Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength).toString());
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
