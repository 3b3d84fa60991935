import { handshakeTimedOut, retryAfterTimeout } from "./until.js";

export interface Completion {
  readonly choices: readonly {
    readonly token_ids: readonly number[];
    readonly finish_reason: string;
  }[];
  readonly kv_transfer_params?: TransferParams | null;
}

export type TransferParams = Readonly<Record<string, unknown>>;
export type Tokens = readonly number[];

/** vLLM closes an idle connection, possibly while the next request is on its way. */
export const ONE_USE = { connection: "close" };

export interface CallOptions {
  readonly id?: string;
  readonly signal?: AbortSignal;
  /** vLLM's prefix cache matches only requests with the same salt, or without any. */
  readonly salt?: string;
  readonly headers?: Readonly<Record<string, string>>;
}

export const freshId = () => crypto.randomUUID();

export function completionBody(tokens: Tokens, maxTokens: number): Record<string, unknown> {
  return {
    model: "tiny",
    prompt: tokens,
    max_tokens: maxTokens,
    temperature: 0,
    ignore_eos: true,
    return_token_ids: true,
  };
}

export function ask(url: string, body: unknown, init: RequestInit = {}): Promise<Response> {
  const headers = {
    "content-type": "application/json",
    ...ONE_USE,
    ...(init.headers as Record<string, string>),
  };
  return fetch(url, { method: "POST", ...init, headers, body: JSON.stringify(body) });
}

/** @throws The response's text, when the status is not 2xx. */
export async function complete(
  url: string,
  body: Readonly<Record<string, unknown>>,
  { id, signal, salt, headers = {} }: CallOptions = {},
): Promise<Completion> {
  const response = await ask(
    `${url}/v1/completions`,
    { ...body, ...(salt === undefined ? {} : { cache_salt: salt }) },
    {
      headers: { ...(id === undefined ? {} : { "x-request-id": id }), ...headers },
      signal: signal ?? null,
    },
  );
  const text = await response.text();
  if (!response.ok) throw new Error(`${url} answered ${response.status}: ${text}`);
  return JSON.parse(text) as Completion;
}

export async function prefill(
  url: string,
  tokens: Tokens,
  options: CallOptions = {},
): Promise<TransferParams> {
  const asked = { do_remote_decode: true, do_remote_prefill: false };
  const body = { ...completionBody(tokens, 1), kv_transfer_params: asked };
  const { kv_transfer_params: params } = await complete(url, body, options);
  if (params === undefined || params === null) throw new Error(`${url} kept no blocks`);
  return params;
}

export async function decode(
  url: string,
  tokens: Tokens,
  maxTokens: number,
  params: TransferParams,
  options: CallOptions = {},
): Promise<Tokens> {
  const body = { ...completionBody(tokens, maxTokens), kv_transfer_params: params };
  return tokensOf(await complete(url, body, options));
}

export async function plain(
  url: string,
  tokens: Tokens,
  maxTokens: number,
  options: CallOptions = {},
): Promise<Tokens> {
  return tokensOf(await complete(url, completionBody(tokens, maxTokens), options));
}

export const tokensOf = ({ choices }: Completion): Tokens => choices[0]?.token_ids ?? [];

/** A request whose prompt the server at `url` has computed. */
export async function prefilled(url: string, decoder: string, tokens: Tokens) {
  const id = freshId();
  const params = await prefill(url, tokens, { id });
  return {
    params,
    /** With a salt: D would not read blocks that are in its prefix cache. */
    decode: (maxTokens: number, options: CallOptions = {}) =>
      decode(decoder, tokens, maxTokens, params, { id, salt: id, ...options }),
  };
}

/** Also after a handshake timeout. */
export function handedOver(
  url: string,
  d: { readonly url: string; log(): string },
  tokens: Tokens,
  maxTokens: number,
  options: CallOptions = {},
): Promise<Tokens> {
  return retryAfterTimeout(
    async () => (await prefilled(url, d.url, tokens)).decode(maxTokens, options),
    handshakeTimedOut(d),
  );
}
