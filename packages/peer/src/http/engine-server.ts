import { KvError, type KvTransferParams } from "@kv/interface";
import { z } from "zod";
import { parseJson, requestJson, sendRequest } from "./http-request.js";
import { type MetricSamples, parsePrometheusText } from "./prometheus-text.js";

/** A prompt as text or as token ids. */
export type Prompt = readonly number[] | string;

/** Options of a request that computes. */
export interface CallOptions {
  readonly signal?: AbortSignal | undefined;
  /** `X-Request-Id`; the server generates an id when absent. */
  readonly requestId?: string | undefined;
}

/** Options of an `EngineServer`. */
export interface EngineServerOptions {
  /** Limit of requests that compute, in ms. @default 300_000 */
  readonly computeTimeoutMs?: number | undefined;
  /** Limit of other requests, in ms. @default 5_000 */
  readonly timeoutMs?: number | undefined;
}

/** A model of `/v1/models`. */
export interface ServedModel {
  readonly id: string;
  readonly root: string | undefined;
}

/** What a client gets. */
export interface Answer {
  /** Empty where the server does not answer them. */
  readonly tokens: readonly number[];
  readonly text: string;
}

/** The shortest prompt, of which the server keeps one block. */
export const PROBE_PROMPT: readonly number[] = [20, 30];

const model = z.looseObject({ id: z.string(), root: z.string().nullish() });
const modelsSchema = z.looseObject({
  data: z.tuple([model], model),
});
const completionSchema = z.looseObject({
  choices: z.array(
    z.looseObject({ token_ids: z.array(z.int()).nullish(), text: z.string().nullish() }),
  ),
  kv_transfer_params: z.record(z.string(), z.unknown()).nullish(),
});

/**
 * A client of one server with vLLM's HTTP interface. It sends nothing before the first call.
 * Methods throw `KV_PROXY_UPSTREAM_FAILED` unless said otherwise.
 */
export class EngineServer {
  readonly url: string;
  readonly #computeTimeoutMs: number;
  readonly #timeoutMs: number;
  #model: Promise<ServedModel> | undefined;

  constructor(url: string, options: EngineServerOptions = {}) {
    this.url = url;
    this.#computeTimeoutMs = options.computeTimeoutMs ?? 300_000;
    this.#timeoutMs = options.timeoutMs ?? 5_000;
  }

  async health(): Promise<void> {
    const { status } = await this.#get("/health");
    if (status === 200) return;
    throw new KvError("KV_PROXY_UPSTREAM_FAILED", `${this.url}/health answered ${status}`);
  }

  /** Undefined without a `/version` route. */
  async version(): Promise<string | undefined> {
    const { status, text } = await this.#get("/version");
    if (status !== 200) return undefined;
    return z.looseObject({ version: z.string().max(200) }).safeParse(parseJson(text)).data?.version;
  }

  /** The first of `/v1/models`, asked for once. */
  async model(): Promise<ServedModel> {
    this.#model ??= this.#fetchModel();
    try {
      return await this.#model;
    } catch (error) {
      this.#model = undefined;
      throw error;
    }
  }

  async metrics(): Promise<MetricSamples> {
    const { status, text } = await this.#get("/metrics");
    if (status === 200) return parsePrometheusText(text);
    throw new KvError("KV_PROXY_UPSTREAM_FAILED", `${this.url}/metrics answered ${status}`);
  }

  /**
   * Has the server compute a prompt and keep its blocks.
   *
   * @throws `KV_REQUEST_INVALID` when the answer has no `kv_transfer_params`.
   */
  async prefill(prompt: Prompt, options?: CallOptions): Promise<KvTransferParams> {
    const { kv_transfer_params } = await this.#complete(
      prompt,
      { max_tokens: 1, kv_transfer_params: { do_remote_decode: true, do_remote_prefill: false } },
      options,
    );
    if (kv_transfer_params != null) return kv_transfer_params;
    throw new KvError(
      "KV_REQUEST_INVALID",
      `${this.url} computed the prompt and answered no kv_transfer_params`,
      {
        hint: 'start it with --kv-transfer-config and a NixlConnector, kv_role "kv_producer" or "kv_both"',
      },
    );
  }

  /** Returns the generated token ids; empty when the server does not answer them. */
  async decode(
    prompt: Prompt,
    params: KvTransferParams,
    maxTokens: number,
    options?: CallOptions,
  ): Promise<readonly number[]> {
    const { choices } = await this.#complete(
      prompt,
      { max_tokens: maxTokens, kv_transfer_params: params, return_token_ids: true },
      options,
    );
    return choices[0]?.token_ids ?? [];
  }

  async complete(prompt: Prompt, maxTokens: number, options?: CallOptions): Promise<Answer> {
    const { choices } = await this.#complete(
      prompt,
      { max_tokens: maxTokens, return_token_ids: true },
      options,
    );
    return { tokens: choices[0]?.token_ids ?? [], text: choices[0]?.text ?? "" };
  }

  /** Causes an engine step, in which vLLM processes notifications and leases. */
  async nudge(): Promise<void> {
    await this.#complete(PROBE_PROMPT, { max_tokens: 1 });
  }

  #get(path: string) {
    return sendRequest(`${this.url}${path}`, { timeoutMs: this.#timeoutMs });
  }

  async #fetchModel(): Promise<ServedModel> {
    const url = `${this.url}/v1/models`;
    const request = { timeoutMs: this.#timeoutMs };
    const { data } = await requestJson(url, request, modelsSchema, "a list of models");
    const [{ id, root }] = data;
    return { id, root: root ?? undefined };
  }

  async #complete(
    prompt: Prompt,
    fields: Record<string, unknown>,
    { signal, requestId }: CallOptions = {},
  ) {
    const { id: model } = await this.model();
    const request = {
      method: "POST",
      body: { model, prompt, temperature: 0, ignore_eos: true, stream: false, ...fields },
      timeoutMs: this.#computeTimeoutMs,
      headers: requestId === undefined ? undefined : { "x-request-id": requestId },
      signal,
    } as const;
    const url = `${this.url}/v1/completions`;
    return requestJson(url, request, completionSchema, "a completion");
  }
}
