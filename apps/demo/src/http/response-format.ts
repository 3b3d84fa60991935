import type { EngineResult } from "../engine/request.js";
import type { Tokenizer } from "../model/tokenizer/tokenizer.js";
import type { ChatBody, CompletionBody } from "./request-body.js";

type Place = "whole" | "first" | "next";

export interface ResponseShape {
  objectOf(place: Place): string;
  contentOf(text: string, place: Place): object;
  /** Whether a choice has the prompt's token ids; else the response has them beside its choices. */
  readonly hasPromptInChoice: boolean;
}

export interface ResponseOptions {
  readonly body: ChatBody | CompletionBody;
  readonly tokenizer: Tokenizer;
  readonly shape: ResponseShape;
  readonly promptTokens: readonly number[];
  readonly id: string;
  readonly model: string;
}

/** The bodies of one request's response, in vLLM's form. */
export class ResponseFormat {
  readonly text: TextStream;
  readonly #options: ResponseOptions;
  readonly #created = Math.floor(Date.now() / 1000);

  constructor(options: ResponseOptions) {
    this.#options = options;
    this.text = new TextStream(options.tokenizer);
  }

  whole(result: EngineResult): object {
    const { tokenizer, shape } = this.#options;
    const choice = {
      ...shape.contentOf(tokenizer.decode(result.tokens), "whole"),
      finish_reason: result.finishReason,
      token_ids: this.#returned(result.tokens),
    };
    return {
      ...this.#response("whole", choice),
      usage: this.#usage(result),
      kv_transfer_params: transferParamsOf(result) ?? null,
    };
  }

  chunk(token: number, text: string, isFirst: boolean): object {
    const { shape } = this.#options;
    const place = isFirst ? "first" : "next";
    return this.#response(place, {
      ...shape.contentOf(text, place),
      finish_reason: null,
      token_ids: this.#returned([token]),
    });
  }

  finalChunk(result: EngineResult): object {
    const choice = {
      ...this.#options.shape.contentOf(this.text.end(), "next"),
      finish_reason: result.finishReason,
    };
    return { ...this.#response("next", choice), kv_transfer_params: transferParamsOf(result) };
  }

  usageChunk(result: EngineResult): object {
    return { ...this.#response("next", {}), choices: [], usage: this.#usage(result) };
  }

  #usage({ tokens }: EngineResult): object {
    const prompt = this.#options.promptTokens.length;
    return {
      prompt_tokens: prompt,
      total_tokens: prompt + tokens.length,
      completion_tokens: tokens.length,
      prompt_tokens_details: null,
    };
  }

  #returned(tokens: readonly number[]) {
    return this.#options.body.return_token_ids === true ? tokens : undefined;
  }

  #response(place: Place, choice: object): object {
    const { id, model, shape, promptTokens } = this.#options;
    const prompt = place === "next" ? undefined : this.#returned(promptTokens);
    const [inChoice, beside] = shape.hasPromptInChoice ? [prompt] : [undefined, prompt];
    return {
      id,
      object: shape.objectOf(place),
      created: this.#created,
      model,
      choices: [
        { index: 0, logprobs: null, stop_reason: null, ...choice, prompt_token_ids: inChoice },
      ],
      prompt_token_ids: beside,
    };
  }
}

/** As in vLLM, the number of cached tokens is P's, with those that it has read back. */
function transferParamsOf({ kvTransferParams, cachedTokens, remoteTokens }: EngineResult) {
  if (kvTransferParams === undefined || kvTransferParams["do_remote_decode"] === true)
    return kvTransferParams;
  return { ...kvTransferParams, remote_prefill_cached_tokens: cachedTokens + remoteTokens };
}

export const CHAT: ResponseShape = {
  objectOf: (place) => (place === "whole" ? "chat.completion" : "chat.completion.chunk"),
  contentOf: (content, place) =>
    place === "next"
      ? { delta: { content } }
      : { [place === "whole" ? "message" : "delta"]: { role: "assistant", content } },
  hasPromptInChoice: false,
};

export const COMPLETION: ResponseShape = {
  objectOf: () => "text_completion",
  contentOf: (text) => ({ text }),
  hasPromptInChoice: true,
};

const INCOMPLETE = "\ufffd";

/**
 * Decodes tokens that arrive one by one: a window of the last tokens without and with the new one,
 * as a single token loses its leading space. A character whose bytes are spread over several tokens
 * is withheld until it is complete.
 */
export class TextStream {
  readonly #tokenizer: Pick<Tokenizer, "decode">;
  readonly #tokens: number[] = [];
  #from = 0;
  #returned = 0;

  constructor(tokenizer: Pick<Tokenizer, "decode">) {
    this.#tokenizer = tokenizer;
  }

  push(token: number): string {
    this.#tokens.push(token);
    const added = this.#newText();
    if (added === "" || added.endsWith(INCOMPLETE)) return "";
    this.#from = this.#returned;
    this.#returned = this.#tokens.length;
    return added;
  }

  end(): string {
    return this.#returned === this.#tokens.length ? "" : this.#newText();
  }

  #newText(): string {
    const before = this.#tokenizer.decode(this.#tokens.slice(this.#from, this.#returned));
    return this.#tokenizer.decode(this.#tokens.slice(this.#from)).slice(before.length);
  }
}
