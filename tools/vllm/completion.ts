/** The fields of a completion that the tests read. */
export interface Completion {
  readonly choices: readonly {
    readonly token_ids: readonly number[];
    readonly finish_reason: string;
  }[];
  readonly kv_transfer_params?: TransferParams | null;
}

export type TransferParams = Readonly<Record<string, unknown>>;

/**
 * One connection per request. vLLM closes a connection that was idle for five seconds, possibly
 * while the next request is on its way.
 */
export const ONE_USE = { connection: "close" };

export interface CallOptions {
  /** `X-Request-Id`. In push both legs of a request carry the same id. */
  readonly id?: string;
  readonly signal?: AbortSignal;
  /**
   * The cache salt. vLLM's prefix cache matches only requests with the same salt, or requests that
   * both have none.
   */
  readonly salt?: string;
  /** Further headers. */
  readonly headers?: Readonly<Record<string, string>>;
}

/** Every request of the tests is greedy and ignores end-of-sequence tokens. */
export function completionBody(
  tokens: readonly number[],
  maxTokens: number,
): Record<string, unknown> {
  return {
    model: "tiny",
    prompt: tokens,
    max_tokens: maxTokens,
    temperature: 0,
    ignore_eos: true,
    return_token_ids: true,
  };
}

/**
 * Sends a request to `/v1/completions` of any server. Throws an error with the response's text when
 * the status is not 2xx.
 */
export async function complete(
  url: string,
  body: Readonly<Record<string, unknown>>,
  { id, signal, salt, headers = {} }: CallOptions = {},
): Promise<Completion> {
  const response = await fetch(`${url}/v1/completions`, {
    method: "POST",
    headers: {
      "content-type": "application/json",
      ...ONE_USE,
      ...(id === undefined ? {} : { "x-request-id": id }),
      ...headers,
    },
    body: JSON.stringify({ ...body, ...(salt === undefined ? {} : { cache_salt: salt }) }),
    ...(signal === undefined ? {} : { signal }),
  });
  const text = await response.text();
  if (!response.ok) throw new Error(`${url} answered ${response.status}: ${text}`);
  return JSON.parse(text) as Completion;
}

/**
 * The first leg of a split request: P computes the prompt and keeps its blocks for a decode worker.
 */
export async function prefill(
  url: string,
  tokens: readonly number[],
  options: CallOptions = {},
): Promise<TransferParams> {
  const asked = { do_remote_decode: true, do_remote_prefill: false };
  const body = { ...completionBody(tokens, 1), kv_transfer_params: asked };
  const { kv_transfer_params: params } = await complete(url, body, options);
  if (params === undefined || params === null) throw new Error(`${url} kept no blocks`);
  return params;
}

/** The second leg of a split request: D gets the blocks and generates the tokens. */
export async function decode(
  url: string,
  tokens: readonly number[],
  maxTokens: number,
  params: TransferParams,
  options: CallOptions = {},
): Promise<readonly number[]> {
  const body = { ...completionBody(tokens, maxTokens), kv_transfer_params: params };
  return tokenIds(await complete(url, body, options));
}

/** A request that is not split: one worker does prefill and decode. */
export async function plain(
  url: string,
  tokens: readonly number[],
  maxTokens: number,
  options: CallOptions = {},
): Promise<readonly number[]> {
  return tokenIds(await complete(url, completionBody(tokens, maxTokens), options));
}

function tokenIds({ choices }: Completion): readonly number[] {
  return choices[0]?.token_ids ?? [];
}
